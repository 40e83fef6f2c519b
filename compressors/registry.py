"""The methods by name. A new method is one file and one entry here."""

from collections.abc import Iterable
from difflib import get_close_matches

from compressors.base import Compressor, MethodSpec, Scorer, Shape
from compressors.errors import MethodError
from compressors.fast_kvzip import FastKVzip
from compressors.kvzap import KVzap
from compressors.kvzip import KVzip
from compressors.random import Random
from compressors.snapkv import SnapKV
from compressors.streaming_llm import StreamingLLM

METHODS: dict[str, type[Scorer]] = {m.name: m for m in (StreamingLLM, SnapKV, KVzip, KVzap, FastKVzip, Random)}


def validate(spec: MethodSpec) -> type[Scorer]:
    """The scorer class of ``spec``. Raises MethodError with the nearest name or the allowed values."""
    _known("compressor", spec.name, METHODS)
    method = METHODS[spec.name]
    if spec.counts not in method.counts:
        raise MethodError(
            f"compressor {spec.name!r} cannot allocate counts {spec.counts!r}: "
            f"its scores allow {', '.join(method.counts)}"
        )
    if not 0 < spec.ratio <= 1:
        raise MethodError(f"ratio must lie in (0, 1], got {spec.ratio}")
    if spec.sinks < 0 or spec.recent < 1:
        raise MethodError(f"sinks must be >= 0 and recent >= 1, got {spec.sinks} and {spec.recent}")
    for option, _ in spec.options:
        _known(f"{spec.name} option", option, method.options)
    method.check(spec)
    return method


def _known(kind: str, name: str, names: Iterable[str]) -> None:
    names = list(names)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
        raise MethodError(f"unknown {kind} {name!r}; {hint}")


def create(spec: MethodSpec, shape: Shape, num_tokens: int) -> Compressor:
    """A compressor for one request of ``num_tokens`` context tokens. Raises MethodError as ``validate`` does, and where
    the method needs something of the model that ``shape`` does not have."""
    method = validate(spec)
    if method.needs_rotary and shape.rotary is None:
        raise MethodError(
            f"{spec.name} turns keys and queries to other positions, and this model has no single rotary embedding "
            f"that all its layers apply; choose a method that needs none"
        )
    if method.network is not None and not isinstance(shape.surrogate, method.network):
        given = "none is loaded" if shape.surrogate is None else "the one loaded is for another method"
        raise MethodError(
            f"{spec.name} needs a surrogate that was trained for it, and {given}; set surrogate to its file"
        )
    return Compressor(method(shape, num_tokens, spec), spec)


def describe() -> list[tuple[str, str, str]]:
    """(name, count modes, summary) of every method, for tables."""
    return [(m.name, ", ".join(m.counts), m.summary) for m in METHODS.values()]
