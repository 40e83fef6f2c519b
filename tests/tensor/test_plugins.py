"""Methods of other distributions: a fake one in a folder on the path, with what can be wrong with it."""

import sys
from pathlib import Path

import pytest

from compressors import METHODS, MethodError, MethodSpec, Scorer, registry, validate
from compressors.plugins import Methods, fault
from compressors.registry import BUILTIN
from vericache.cli import main
from vericache.config import VeriCacheConfig, load
from vericache.errors import ConfigError

GOOD = """
import torch
from compressors import METHODS, Scorer

class Flat(Scorer):
    name = "flat"
    summary = "all tokens alike"
    query_aware = False

    def scores(self):
        return torch.zeros(self.shape.layers, self.shape.kv_heads, self.num_tokens)
"""


def install(folder: Path, source: str, entries: str, name: str = "fake-kv") -> None:
    """A distribution as an installer leaves it."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[vericache.compressors]\n{entries}\n")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On the module path; what is imported from it is forgotten."""
    assert METHODS  # complete before anything is installed
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("fake_kv", "other_kv"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(registry, "METHODS", Methods(BUILTIN))
    return tmp_path


def test_a_distribution_registers_a_method(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(path, GOOD, "flat = fake_kv:Flat")
    methods = registry.METHODS
    assert list(methods) == [*(m.name for m in BUILTIN), "flat"]
    assert len(methods) == len(BUILTIN) + 1
    assert issubclass(methods["flat"], Scorer)
    assert validate(MethodSpec("flat", "per_layer")) is methods["flat"]
    assert VeriCacheConfig(compressor="flat").method.counts == "per_head"
    assert main(["methods"]) == 0
    assert "all tokens alike" in capsys.readouterr().out


def test_without_any_there_are_the_built_in_ones(path: Path) -> None:
    assert dict(registry.METHODS) == {m.name: m for m in BUILTIN}


@pytest.mark.parametrize(
    ("source", "entry", "message"),
    [
        (GOOD, "snapkv = fake_kv:Flat", "fake_kv:Flat. and by VeriCache; uninstall one"),
        (GOOD, "other = fake_kv:Flat", "calls itself 'flat', expected the name of the entry point"),
        (GOOD, "flat = fake_kv:Missing", "cannot be loaded from fake_kv:Missing: AttributeError"),
        (GOOD, "flat = absent_kv:Flat", "cannot be loaded from absent_kv:Flat: ModuleNotFoundError"),
        ("1 / 0", "flat = fake_kv:Flat", "cannot be loaded from fake_kv:Flat: ZeroDivisionError"),
        ("def Flat(): pass", "flat = fake_kv:Flat", "is <function Flat .*>, expected a subclass of compressors.Scorer"),
        ("class Flat: pass", "flat = fake_kv:Flat", "expected a subclass"),
        (GOOD.replace("def scores", "def score"), "flat = fake_kv:Flat", "has no scores"),
        (GOOD.replace("query_aware = False", ""), "flat = fake_kv:Flat", "has no query_aware, expected a bool"),
        (GOOD.replace("summary", "title"), "flat = fake_kv:Flat", "has no summary, expected a str"),
        (GOOD + "    counts = ('all',)", "flat = fake_kv:Flat", r"has counts \('all',\), expected some of uniform"),
        (GOOD + "    counts = ('uniform',)", "flat = fake_kv:Flat", "has default_counts 'per_head', expected one of"),
        (GOOD + "    selectors = ()", "flat = fake_kv:Flat", r"has selectors \(\), expected 'top' and"),
        (GOOD + "    options = {'a': 0.5}", "flat = fake_kv:Flat", "has options {'a': 0.5}, expected integers"),
        (GOOD + "    texts = {'turn': 'x'}", "flat = fake_kv:Flat", "has a text 'turn'"),
    ],
    ids=range(15),
)
def test_a_broken_one_is_an_error_that_names_the_distribution(
    path: Path, source: str, entry: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for those who use another method: nothing is left out without a word."""
    install(path, source, entry)
    for _ in range(2):
        with pytest.raises(
            MethodError, match=rf"^compressor '\w+' (of|is registered by) distribution fake-kv 1\.2.*{message}"
        ):
            validate(MethodSpec("streaming_llm"))
    with pytest.raises(ConfigError, match="distribution fake-kv"):
        load({}, {})
    assert main(["methods"]) == 2
    assert capsys.readouterr().err.startswith("vericache methods: compressor ")


def test_two_distributions_cannot_register_the_same_name(path: Path) -> None:
    install(path, GOOD, "flat = fake_kv:Flat")
    install(path, GOOD, "flat = other_kv:Flat", "other-kv")
    with pytest.raises(
        MethodError, match=r"'flat' is registered by distribution other-kv 1\.2 .* and by distribution fake"
    ):
        list(registry.METHODS)


@pytest.mark.parametrize("method", BUILTIN)
def test_nothing_is_wrong_with_the_built_in_ones(method: type[Scorer]) -> None:
    assert fault(method, method.name) is None
