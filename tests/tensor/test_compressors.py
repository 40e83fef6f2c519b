"""Every method of the registry, in every count mode, against brute force; and what each announces of its probes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressors import METHODS, Compressor, Kept, MethodError, MethodSpec, create, validate
from tests.tensor.compressor_runs import SHAPE, Context, brute_force, check_structure, drive, heads_of, quick, shape_of

GRID = [(name, counts) for name, method in METHODS.items() for counts in method.counts]
ROW_TOKENS = 100  # scoring rows so short that a method which splits the context has to split it


def spec_of(name: str, counts: str, ratio: float = 0.4, **changes: int) -> MethodSpec:
    """The method's defaults, fitted into short rows."""
    return METHODS[name].fit(MethodSpec(name, counts, ratio, **changes), ROW_TOKENS)


def run(spec: MethodSpec, context: Context) -> tuple[Compressor, Kept]:
    compressor = create(spec, context.shape, len(context.tokens))
    drive(compressor, context)
    return compressor, compressor.select()


# -- every method, every count mode ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "counts"), GRID)
@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.999])
def test_selection_is_what_brute_force_selects(name: str, counts: str, ratio: float) -> None:
    spec, context = spec_of(name, counts, ratio), Context.random(SHAPE, 150)
    compressor, kept = run(spec, context)
    check_structure(kept, spec, SHAPE, 150)
    scores = compressor.scorer.scores()
    assert scores.dtype == torch.float32
    needed = compressor.scorer.needed() if compressor.scorer.dynamic else None
    if kept.bits is not None:  # which tokens get none: ``test_bits``
        needed = kept.counts
    assert heads_of(kept) == brute_force(scores, spec, needed)


@pytest.mark.parametrize(("name", "counts"), GRID)
@pytest.mark.parametrize("num_tokens", [1, 5, 31, 32, 33, 36])
def test_a_context_within_the_forced_tokens_is_kept_whole(name: str, counts: str, num_tokens: int) -> None:
    """A prompt shorter than the observation window must not even be scored wrongly (5 tokens, one window)."""
    _, kept = run(spec_of(name, counts, 0.1), Context.random(SHAPE, num_tokens))
    assert heads_of(kept) == [[list(range(num_tokens))] * SHAPE.kv_heads] * SHAPE.layers


@pytest.mark.parametrize(("name", "counts"), GRID)
def test_ratio_one_is_the_identity(name: str, counts: str) -> None:
    spec = spec_of(name, counts, 1.0)
    compressor, kept = run(spec, Context.random(SHAPE, 90))
    if compressor.scorer.dynamic:  # it may need less
        check_structure(kept, spec, SHAPE, 90)
        return
    assert heads_of(kept) == [[list(range(90))] * SHAPE.kv_heads] * SHAPE.layers


@pytest.mark.parametrize(("name", "counts"), GRID)
def test_one_token_more_than_the_forced_ones(name: str, counts: str) -> None:
    spec = spec_of(name, counts, 0.01)
    _, kept = run(spec, Context.random(SHAPE, 37))
    check_structure(kept, spec, SHAPE, 37)
    assert heads_of(kept) == [[[0, 1, 2, 3, *range(5, 37)]] * SHAPE.kv_heads] * SHAPE.layers


@pytest.mark.parametrize(("name", "counts"), GRID)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_shapes(name: str, counts: str, kv_heads: int, group: int, head_dim: int) -> None:
    shape = shape_of(2, kv_heads, group, head_dim)
    assert shape.group == group
    spec = spec_of(name, counts)
    _, kept = run(spec, Context.random(shape, 70))
    check_structure(kept, spec, shape, 70)


@pytest.mark.parametrize(("name", "counts"), GRID)
def test_selections_are_reproducible(name: str, counts: str) -> None:
    context = Context.random(SHAPE, 120)
    first, second = (run(spec_of(name, counts), context)[1] for _ in range(2))
    assert torch.equal(first.counts, second.counts)
    assert torch.equal(first.positions, second.positions)


@pytest.mark.parametrize(("name", "counts"), GRID)
def test_bfloat16_models_are_scored_in_float32(name: str, counts: str) -> None:
    """Scores spread over many decades, which half precision cannot rank."""
    compressor = create(spec_of(name, counts), SHAPE, 100)
    drive(compressor, Context.random(SHAPE, 100), torch.bfloat16)
    scores = compressor.scorer.scores()
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    check_structure(compressor.select(), compressor.spec, SHAPE, 100)


@pytest.mark.parametrize(("name", "counts"), GRID)
def test_no_sinks(name: str, counts: str) -> None:
    spec = spec_of(name, counts, sinks=0)
    _, kept = run(spec, Context.random(SHAPE, 110))
    check_structure(kept, spec, SHAPE, 110)


def test_per_head_counts_differ_when_heads_differ() -> None:
    """Guards the grid above against a threshold that is not global."""
    _, kept = run(spec_of("kvzip", "per_head"), Context.random(SHAPE, 150))
    assert len(set(kept.counts.flatten().tolist())) > 1


# -- probes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@quick
@given(data=st.data())
def test_probes_stay_within_what_was_announced(name: str, data: st.DataObject) -> None:
    """The engine reserves pages for ``appended_tokens`` and steps for ``fit`` before it knows a probe."""
    method = METHODS[name]
    n = data.draw(st.integers(1, 260), label="context")
    row_tokens = data.draw(st.integers(1, 400), label="row tokens")
    asks = {key: list(range(data.draw(st.integers(0, 28), label=key))) for key in [*method.texts, "turn"]}
    try:
        spec = method.fit(MethodSpec(name, method.counts[0]), row_tokens)
    except MethodError:
        assert row_tokens < 72  # an instruction of 64 tokens and a chunk of 8
        return
    assert validate(spec) is method
    assert method.fit(spec, row_tokens) == spec
    tokens = list(range(5000, 5000 + n))
    appended = method.appended_tokens(spec, n)
    for probe in method.probes(tokens, spec, asks):
        assert 1 <= len(probe.tokens) <= row_tokens
        if probe.start < n:
            assert probe.tokens == tuple(tokens[probe.start : probe.start + len(probe.tokens)])
        else:
            assert probe.start == n
            assert len(probe.tokens) <= appended


@pytest.mark.parametrize("name", METHODS)
def test_fit_keeps_what_fits(name: str) -> None:
    method = METHODS[name]
    spec = MethodSpec(name, method.counts[0])
    fitted = method.fit(spec, 100_000)
    assert {option: method.option(fitted, option) for option in method.options} == dict(method.options)
    assert replace(fitted, options=()) == spec


def probing_methods() -> list[str]:
    texts = {key: [1] for method in METHODS.values() for key in (*method.texts, "turn")}
    return [name for name, m in METHODS.items() if m.probes(list(range(99)), MethodSpec(name, m.counts[0]), texts)]


@pytest.mark.parametrize("name", probing_methods())
def test_fit_refuses_rows_that_hold_no_probe(name: str) -> None:
    with pytest.raises(MethodError, match=name):
        METHODS[name].fit(MethodSpec(name, METHODS[name].counts[0]), 0)


# -- methods that score nothing ------------------------------------------------------------------------------


def test_a_method_without_probes_observes_nothing() -> None:
    with pytest.raises(NotImplementedError, match="streaming_llm"):
        create(MethodSpec("streaming_llm"), SHAPE, 50).observe(
            0, 0, torch.zeros(1, 6, 16), torch.zeros(1, 2, 16), lambda p: p, 1.0
        )


def test_random_depends_on_its_seed_only() -> None:
    def positions(seed: int) -> list[int]:
        spec = MethodSpec("random", options=(("seed", seed),))
        return create(spec, SHAPE, 200).select().positions.tolist()

    assert positions(3) == positions(3)
    assert positions(3) != positions(4)


def test_streaming_llm_keeps_sinks_and_the_most_recent() -> None:
    kept = create(MethodSpec("streaming_llm", ratio=0.25), SHAPE, 200).select()
    assert heads_of(kept) == [[[0, 1, 2, 3, *range(154, 200)]] * SHAPE.kv_heads] * SHAPE.layers
