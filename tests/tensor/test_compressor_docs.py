"""docs/compressors.md says of every method what its class says, and its example works as it stands there."""

import re
from pathlib import Path

import pytest

from compressors import METHODS, MethodError, MethodSpec, Scorer, create, registry, validate
from compressors.budget import COUNTS
from compressors.plugins import Methods
from compressors.registry import BUILTIN
from compressors.select import SELECTORS
from tests.tensor.compressor_runs import SHAPE, Context, brute_force, drive, heads_of
from tests.tensor.test_plugins import install, path  # noqa: F401 a fixture
from vericache.config import VeriCacheConfig

TEXT = (Path(__file__).parents[2] / "docs/compressors.md").read_text()
LINES = {
    cells[0].strip("`"): cells[1:] for line in TEXT.splitlines() if len(cells := line.strip("| ").split(" | ")) == 5
}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize("method", BUILTIN)
def test_every_method_has_its_line(method: type[Scorer]) -> None:
    counts, query_aware, needs, source = LINES[method.name]
    others = [c for c in method.counts if c != method.default_counts]
    assert counts == ", ".join([method.default_counts, *(["any"] if len(others) == len(COUNTS) - 1 else others)])
    assert query_aware == ("yes" if method.query_aware else "no")
    assert ("rotary" in needs) == method.needs_rotary
    assert source


def test_every_line_has_its_method() -> None:
    assert LINES.keys() - {"name", "---"} == {m.name for m in BUILTIN}


@pytest.mark.parametrize("word", [*COUNTS, *SELECTORS])
def test_every_count_mode_and_selector_is_explained(word: str) -> None:
    assert f"`{word}`" in TEXT


def test_settings_that_are_named_exist() -> None:
    choices = TEXT[TEXT.index("| choice |") : TEXT.index("**Budget.**")]
    named = re.findall(r"`(\w+)`", choices)
    assert len(named) == 14
    assert set(named) <= VeriCacheConfig.model_fields.keys()


def test_the_example_works(path: Path) -> None:  # noqa: F811 the fixture
    source, entry = block("python"), block("toml").splitlines()[1].replace('"', "")
    assert source.count("\n") <= 40
    install(path, source, entry, "my-module")
    name = entry.partition(" ")[0]
    assert isinstance(registry.METHODS, Methods)
    for counts in COUNTS:
        spec = MethodSpec(name, counts, 0.4, options=(("power", 2),))
        compressor, context = create(spec, SHAPE, 120), Context.random(SHAPE, 120)
        drive(compressor, context)
        kept, norms = compressor.select(), context.values.norm(dim=-1).square()
        assert heads_of(kept) == brute_force(norms, spec)
    with pytest.raises(MethodError, match="'power' must be at least 1, got 0"):
        validate(MethodSpec(name, options=(("power", 0),)))
    assert name not in METHODS, "the registry of other tests is left alone"
