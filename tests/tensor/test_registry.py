"""The registry of compression methods: what it says of them, and which specs it refuses."""

import math

import pytest

from compressors import METHODS, MethodError, MethodSpec, create, describe, validate
from compressors.budget import COUNTS
from compressors.select import SELECTORS
from tests.tensor.compressor_runs import SHAPE


@pytest.mark.parametrize("name", METHODS)
def test_registered_methods_are_described_and_valid(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert set(method.counts) <= set(COUNTS)
    assert method.default_counts in method.counts
    assert "top" in method.selectors
    assert set(method.selectors) <= set(SELECTORS)
    assert any(row[0] == name and row[2] == method.summary for row in describe())
    for counts in method.counts:
        assert validate(MethodSpec(name, counts)) is method


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MethodSpec("kvzp"), r"unknown compressor 'kvzp'; did you mean 'kvzip'\?"),
        (MethodSpec("snap_kv"), r"did you mean 'snapkv'\?"),
        (MethodSpec("zzz"), "unknown compressor 'zzz'; known: streaming_llm, snapkv"),
        (MethodSpec("streaming_llm", "per_head"), "'streaming_llm' cannot allocate counts 'per_head'.* uniform"),
        (MethodSpec("kvzip", "per_token"), "cannot allocate counts 'per_token'.* uniform, per_layer, per_head"),
        (MethodSpec("pyramidkv", "uniform"), "'pyramidkv' cannot allocate counts 'uniform'.* pyramid"),
        (MethodSpec("kvzip", "pyramid", beta=0.99), "beta of a pyramid must be at least 1 .*, got 0.99"),
        (MethodSpec("kvzip", beta=math.nan), "beta"),
        (
            MethodSpec("kvzip", selector="best"),
            "'kvzip' cannot select by 'best': its scores allow top, poisson, pareto",
        ),
        (MethodSpec("random", selector="pareto"), "'random' cannot select by 'pareto': its scores allow top$"),
        (MethodSpec("kvzip", power=0.0), "power > 0, .* got 0.0"),
        (MethodSpec("kvzip", floor=0.0), "floor in"),
        (MethodSpec("kvzip", floor=math.nan), "floor in"),
        (MethodSpec("kvzip", seed=-1), "seed in"),
        (MethodSpec("kvzip", seed=2**32), "seed in"),
        (MethodSpec("kvzip", ratio=0.0), r"ratio must lie in \(0, 1\], got 0.0"),
        (MethodSpec("kvzip", ratio=-0.5), "ratio"),
        (MethodSpec("kvzip", ratio=1.01), "ratio"),
        (MethodSpec("kvzip", ratio=math.nan), "ratio"),
        (MethodSpec("kvzip", sinks=-1), "sinks must be >= 0 .* got -1 and 32"),
        (MethodSpec("kvzip", recent=0), "recent >= 1, got 4 and 0"),
        (MethodSpec("kvzip", options=(("chnk", 64),)), r"unknown kvzip option 'chnk'; did you mean 'chunk'\?"),
        (MethodSpec("streaming_llm", options=(("window", 4),)), "option 'window'; known: none"),
        (MethodSpec("kvzip", options=(("chunk", 7),)), "'chunk' must be at least 8, got 7"),
        (MethodSpec("snapkv", options=(("kernel", 4),)), "'kernel' must be odd and positive, got 4"),
        (MethodSpec("snapkv", options=(("kernel", 0),)), "'kernel' must be odd"),
        (MethodSpec("snapkv", options=(("kernel", -3),)), "'kernel' must be odd"),
        (MethodSpec("snapkv", options=(("window", 0),)), r"'window' must lie in 1..recent \(32\), got 0"),
        (MethodSpec("snapkv", options=(("window", 33),)), r"'window' must lie in 1..recent \(32\), got 33"),
    ],
)
def test_wrong_specs_are_refused_with_the_reason(spec: MethodSpec, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        validate(spec)
    with pytest.raises(MethodError, match=message):
        create(spec, SHAPE, 100)


def test_with_option_replaces_and_keeps_the_spec_hashable() -> None:
    spec = MethodSpec("snapkv", options=(("window", 8),)).with_option("kernel", 3).with_option("window", 9)
    assert spec.options == (("kernel", 3), ("window", 9))
    assert hash(spec) == hash(MethodSpec("snapkv", options=(("kernel", 3), ("window", 9))))
