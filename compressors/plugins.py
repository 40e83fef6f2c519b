"""Methods of other distributions: the entry point group ``vericache.compressors``.

[project.entry-points."vericache.compressors"]
my_method = "my_package.module:MyScorer"
"""

from collections.abc import Iterable, Iterator, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract

from compressors.base import Scorer
from compressors.budget import COUNTS
from compressors.errors import MethodError
from compressors.select import SELECTORS

GROUP = "vericache.compressors"


class Methods(MutableMapping[str, type[Scorer]]):
    """Scorers by name: the built-in ones, and those of installed distributions. The latter are loaded at the first
    look, not at import, because their modules import this package.

    Looking raises MethodError, which names the distribution, while one of them is broken or takes a name that exists.
    """

    def __init__(self, builtin: Iterable[type[Scorer]]) -> None:
        self._methods = {method.name: method for method in builtin}
        self._complete = False

    def _all(self) -> dict[str, type[Scorer]]:
        if not self._complete:
            self._methods = load(self._methods)
            self._complete = True
        return self._methods

    def __getitem__(self, name: str) -> type[Scorer]:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __setitem__(self, name: str, method: type[Scorer]) -> None:
        self._all()[name] = method

    def __delitem__(self, name: str) -> None:
        del self._all()[name]


def load(builtin: dict[str, type[Scorer]]) -> dict[str, type[Scorer]]:
    """``builtin`` and the methods of the entry point group. Raises MethodError."""
    found, owners = dict(builtin), dict.fromkeys(builtin, "VeriCache")
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        owner = (
            f"distribution {entry.dist.name} {entry.dist.version}" if entry.dist else "a distribution without a name"
        )
        if entry.name in found:
            raise MethodError(
                f"compressor {entry.name!r} is registered by {owner} ({entry.value}) and by {owners[entry.name]}; "
                f"uninstall one of them"
            )
        found[entry.name], owners[entry.name] = _loaded(entry, owner), owner
    return found


def _loaded(entry: EntryPoint, owner: str) -> type[Scorer]:
    try:
        method = entry.load()
    except Exception as error:  # importing third-party code can raise anything
        raise MethodError(
            f"compressor {entry.name!r} of {owner} cannot be loaded from {entry.value}: "
            f"{type(error).__name__}: {error}; repair or uninstall it"
        ) from error
    if problem := fault(method, entry.name):
        raise MethodError(f"compressor {entry.name!r} of {owner}: {entry.value} {problem}; repair or uninstall it")
    return method


def fault(method: object, name: str) -> str | None:
    """What keeps ``method`` from being registered as ``name``, or None."""
    if not (isinstance(method, type) and issubclass(method, Scorer)):
        return f"is {method!r}, expected a subclass of compressors.Scorer"
    if isabstract(method):
        return f"has no {', '.join(sorted(method.__abstractmethods__))}"
    for attribute, kind in (("name", str), ("summary", str), ("query_aware", bool)):
        if not isinstance(getattr(method, attribute, None), kind):
            return f"has no {attribute}, expected a {kind.__name__}"
    if method.name != name:
        return f"calls itself {method.name!r}, expected the name of the entry point"
    if not method.counts or not set(method.counts) <= set(COUNTS):
        return f"has counts {method.counts}, expected some of {', '.join(COUNTS)}"
    if method.default_counts not in method.counts:
        return f"has default_counts {method.default_counts!r}, expected one of its counts ({', '.join(method.counts)})"
    if not {"top"} <= set(method.selectors) <= set(SELECTORS):
        return f"has selectors {method.selectors}, expected 'top' and some of {', '.join(SELECTORS)}"
    if not all(isinstance(value, int) for value in method.options.values()):
        return f"has options {dict(method.options)}, expected integers"
    if "turn" in method.texts:
        return "has a text 'turn', which is the name of what the chat template puts before an answer"
    return None
