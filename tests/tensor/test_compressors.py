"""Compressors against brute force and against explicit formulas. Whatever the registry holds is covered."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors import METHODS, Compressor, Kept, MethodError, MethodSpec, Scorer, Shape, create, describe, validate
from compressors.budget import COUNTS, allocate, forced_mask, kept_count
from compressors.select import top_positions

GRID = [(name, counts) for name, method in METHODS.items() for counts in method.counts]
SHAPE = Shape(layers=3, kv_heads=2, query_heads=6, head_dim=16)
ROW_TOKENS = 100  # scoring rows so short that a method which splits the context has to split it
quick = settings(max_examples=60, deadline=None, derandomize=True)


# -- running a method through its interface, as the engine does ------------------------------------------


@dataclass
class Context:
    """A random model state: queries and post-RoPE keys of every context token, and the texts of a tokenizer."""

    shape: Shape
    tokens: list[int]
    queries: Tensor  # [L, Hq, n, D]
    keys: Tensor  # [L, H, n, D]
    texts: dict[str, list[int]]
    scale: float

    @classmethod
    def random(cls, shape: Shape, num_tokens: int, seed: int = 0, sharpness: float = 2.0) -> "Context":
        rng = torch.Generator().manual_seed(seed)
        queries = torch.randn(shape.layers, shape.query_heads, num_tokens, shape.head_dim, generator=rng) * sharpness
        keys = torch.randn(shape.layers, shape.kv_heads, num_tokens, shape.head_dim, generator=rng)
        tokens = torch.randint(0, 1000, (num_tokens,), generator=rng).tolist()
        names = sorted({"turn", *(key for method in METHODS.values() for key in method.texts)})
        texts = {key: list(range(2000 + 10 * i, 2000 + 10 * i + 5 + i)) for i, key in enumerate(names)}
        return cls(shape, tokens, queries, keys, texts, shape.head_dim**-0.5)


@dataclass
class SeenProbe:
    """What one probe showed a scorer, for the references: ``query [L, T, Hq, D]`` and ``key [L, T, H, D]``."""

    start: int
    query: Tensor
    key: Tensor
    asked: list[Tensor]  # positions of every call of ``cached``, in layer order


def drive(compressor: Compressor, context: Context, dtype: torch.dtype = torch.float32) -> list[SeenProbe]:
    """Run the method's scoring pass. A replayed row shows the context's own queries and keys, an appended one new."""
    shape, n = context.shape, len(context.tokens)
    rng = torch.Generator().manual_seed(99)
    seen = []
    for index, probe in enumerate(type(compressor.scorer).probes(context.tokens, compressor.spec, context.texts)):
        count = len(probe.tokens)
        if probe.start < n:
            span = slice(probe.start, probe.start + count)
            query = context.queries[:, :, span].transpose(1, 2)
            key = context.keys[:, :, span].transpose(1, 2)
        else:
            query = 2 * torch.randn(shape.layers, count, shape.query_heads, shape.head_dim, generator=rng)
            key = torch.randn(shape.layers, count, shape.kv_heads, shape.head_dim, generator=rng)
        query, key = query.to(dtype), key.to(dtype)
        record = SeenProbe(probe.start, query, key, [])
        for layer in range(shape.layers):
            cached = reader(context.keys[layer].to(dtype), record.asked)
            compressor.observe(layer, index, query[layer], key[layer], cached, context.scale)
        seen.append(record)
    return seen


def reader(keys: Tensor, asked: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """``CachedKeys`` over ``[H, n, D]`` that refuses what the engine's page reader could not answer."""

    def cached(positions: Tensor) -> Tensor:
        assert positions.dtype == torch.int64
        assert ((positions >= 0) & (positions < keys.shape[1])).all()
        asked.append(positions)
        return keys[:, positions]

    return cached


def spec_of(name: str, counts: str, ratio: float = 0.4, **changes: int) -> MethodSpec:
    """The method's defaults, fitted into short rows."""
    return METHODS[name].fit(MethodSpec(name, counts, ratio, **changes), ROW_TOKENS)


def run(spec: MethodSpec, context: Context) -> tuple[Compressor, Kept]:
    compressor = create(spec, context.shape, len(context.tokens))
    drive(compressor, context)
    return compressor, compressor.select()


class Fixed(Scorer):
    """Scores handed in by a test."""

    name = "fixed"
    summary = "for tests"

    def __init__(self, values: Tensor, spec: MethodSpec) -> None:
        layers, heads, n = values.shape
        super().__init__(Shape(layers, heads, heads, 8), n, spec)
        self.values = values

    def scores(self) -> Tensor:
        return self.values


def select(values: Tensor, counts: str, ratio: float, sinks: int = 1, recent: int = 2) -> Kept:
    spec = MethodSpec("fixed", counts, ratio, sinks, recent)
    return Compressor(Fixed(values, spec), spec).select()


# -- brute force -----------------------------------------------------------------------------------------


def heads_of(kept: Kept) -> list[list[list[int]]]:
    """Kept positions as nested lists ``[layer][head]``."""
    pieces = iter(torch.split(kept.positions, kept.counts.flatten().tolist()))
    return [[next(pieces).tolist() for _ in row] for row in kept.counts.tolist()]


def brute_force(scores: Tensor, mode: str, budget: int, sinks: int, recent: int) -> list[list[list[int]]]:
    """The selection by Python's sort on (score, layer, head, position), with exact fractions for the rounding."""
    layers, heads, n = scores.shape
    values = [
        [[math.inf if i < sinks or i >= n - recent else s for i, s in enumerate(head)] for head in layer]
        for layer in scores.tolist()
    ]
    everything = sorted((-values[a][h][i], a, h, i) for a in range(layers) for h in range(heads) for i in range(n))
    over = [[0] * heads for _ in range(layers)]  # token-heads above the one global threshold
    for _, a, h, _ in everything[: layers * heads * budget]:
        over[a][h] += 1
    if mode == "uniform":
        counts = [[budget] * heads for _ in range(layers)]
    elif mode == "per_head":
        counts = over
    else:
        wanted = [Fraction(sum(row), heads) for row in over]
        whole = [math.floor(w) for w in wanted]
        missing = layers * budget - sum(whole)
        by_remainder = sorted(range(layers), key=lambda a: (whole[a] - wanted[a], a))
        counts = [[whole[a] + (a in by_remainder[:missing])] * heads for a in range(layers)]
    return [
        [sorted(sorted(range(n), key=lambda i: (-values[a][h][i], i))[: counts[a][h]]) for h in range(heads)]
        for a in range(layers)
    ]


def check_structure(kept: Kept, spec: MethodSpec, shape: Shape, n: int) -> None:
    """What holds for every selection of every method."""
    budget = kept_count(spec.ratio, n, spec.sinks, spec.recent)
    assert kept.counts.shape == (shape.layers, shape.kv_heads)
    assert kept.counts.dtype == kept.positions.dtype == torch.int64
    assert int(kept.counts.sum()) == len(kept.positions) == shape.layers * shape.kv_heads * budget
    if spec.counts == "uniform":
        assert (kept.counts == budget).all()
    if spec.counts == "per_layer":
        assert (kept.counts == kept.counts[:, :1]).all()
    forced = set(range(min(spec.sinks, n))) | set(range(max(n - spec.recent, 0), n))
    for layer in heads_of(kept):
        for positions in layer:
            assert all(a < b for a, b in pairwise(positions))
            assert positions[0] >= 0
            assert positions[-1] < n
            assert forced <= set(positions)


# -- every method, every count mode ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "counts"), GRID)
@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.999])
def test_selection_is_what_brute_force_selects(name: str, counts: str, ratio: float) -> None:
    spec, context = spec_of(name, counts, ratio), Context.random(SHAPE, 150)
    compressor, kept = run(spec, context)
    check_structure(kept, spec, SHAPE, 150)
    scores = compressor.scorer.scores()
    assert scores.dtype == torch.float32
    assert heads_of(kept) == brute_force(scores, counts, compressor.budget, spec.sinks, spec.recent)


@pytest.mark.parametrize(("name", "counts"), GRID)
@pytest.mark.parametrize("num_tokens", [1, 5, 31, 32, 33, 36])
def test_a_context_within_the_forced_tokens_is_kept_whole(name: str, counts: str, num_tokens: int) -> None:
    """A prompt shorter than the observation window must not even be scored wrongly (5 tokens, one window)."""
    _, kept = run(spec_of(name, counts, 0.1), Context.random(SHAPE, num_tokens))
    assert heads_of(kept) == [[list(range(num_tokens))] * SHAPE.kv_heads] * SHAPE.layers


@pytest.mark.parametrize(("name", "counts"), GRID)
def test_ratio_one_is_the_identity(name: str, counts: str) -> None:
    _, kept = run(spec_of(name, counts, 1.0), Context.random(SHAPE, 90))
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
    shape = Shape(2, kv_heads, kv_heads * group, head_dim)
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


@quick
@given(n=st.integers(1, 200), chunk=st.integers(8, 64))
def test_kvzip_chunks_cover_the_context_exactly(n: int, chunk: int) -> None:
    spec = MethodSpec("kvzip").with_option("chunk", chunk)
    tokens, texts = list(range(1000, 1000 + n)), {"first": [1, 2], "next": [3], "turn": [4, 5]}
    repeated: list[int] = []
    for index, probe in enumerate(METHODS["kvzip"].probes(tokens, spec, texts)):
        start = index * chunk
        ask = [1, 2] if index == 0 else [3, *tokens[start - 8 : start]]
        part = tokens[start : start + chunk]
        assert probe.tokens == (*ask, 4, 5, *part)
        assert probe.start == n
        repeated += part
    assert repeated == tokens


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_snapkv_replays_the_end_of_the_context(n: int) -> None:
    tokens = list(range(n))
    (probe,) = METHODS["snapkv"].probes(tokens, MethodSpec("snapkv"), {})
    assert probe.tokens == tuple(tokens[-32:])
    assert probe.start == max(n - 32, 0)


def test_a_method_without_probes_observes_nothing() -> None:
    with pytest.raises(NotImplementedError, match="streaming_llm"):
        create(MethodSpec("streaming_llm"), SHAPE, 50).observe(
            0, 0, torch.zeros(1, 6, 16), torch.zeros(1, 2, 16), lambda p: p, 1.0
        )


# -- SnapKV and KVzip against explicit formulas ----------------------------------------------------------------


def snapkv_reference(context: Context, window: int, kernel: int) -> Tensor:
    """Full causal attention of every query head over repeated KV heads, float64; zero outside ``[0, n - window)``."""
    shape, n = context.shape, len(context.tokens)
    out = torch.zeros(shape.layers, shape.kv_heads, n, dtype=torch.float64)
    past = n - window
    for layer in range(shape.layers):
        keys = context.keys[layer].double().repeat_interleave(shape.group, 0)  # repeat_kv: query head a reads a // G
        logits = context.queries[layer].double() @ keys.transpose(1, 2) * context.scale
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        mean = logits.softmax(-1)[:, past:, :past].mean(1)  # [Hq, past]
        for a in range(shape.query_heads):
            for i in range(past):
                near = [float(mean[a, j]) for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < past]
                out[layer, a // shape.group, i] += sum(near) / kernel / shape.group
    return out


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize(("window", "kernel"), [(32, 5), (1, 1), (7, 3), (16, 7), (4, 41)])
def test_snapkv_scores(kv_heads: int, group: int, window: int, kernel: int) -> None:
    context = Context.random(Shape(2, kv_heads, kv_heads * group, 16), 45)
    spec = MethodSpec("snapkv", options=(("kernel", kernel), ("window", window)))
    compressor = create(spec, context.shape, 45)
    (seen,) = drive(compressor, context)
    assert seen.start == 45 - window
    torch.testing.assert_close(
        compressor.scorer.scores().double(), snapkv_reference(context, window, kernel), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("n", [33, 34, 40])
def test_snapkv_just_behind_its_window(n: int) -> None:
    context = Context.random(SHAPE, n)
    compressor = create(MethodSpec("snapkv"), SHAPE, n)
    drive(compressor, context)
    torch.testing.assert_close(
        compressor.scorer.scores().double(), snapkv_reference(context, 32, 5), rtol=1e-4, atol=1e-7
    )


def kvzip_reference(context: Context, spec: MethodSpec, probes: Sequence[SeenProbe]) -> Tensor:
    """Chunk by chunk, query by query, head by head, in float64: softmax over sinks, chunk and the row's own past."""
    shape, n = context.shape, len(context.tokens)
    chunk = METHODS["kvzip"].option(spec, "chunk")
    out = torch.zeros(shape.layers, shape.kv_heads, n, dtype=torch.float64)
    for index, probe in enumerate(probes):
        rows = range(index * chunk, min((index + 1) * chunk, n))
        subset = sorted({*range(min(spec.sinks, n)), *rows})
        for layer in range(shape.layers):
            for a in range(shape.query_heads):
                head = a // shape.group
                held = context.keys[layer, head, subset].double()
                own = probe.key[layer, :, head].double()
                for t in range(len(own)):
                    logits = torch.cat([held, own[: t + 1]]) @ probe.query[layer, t, a].double() * context.scale
                    weights = logits.softmax(0)
                    for place, i in enumerate(subset):
                        if i in rows:
                            out[layer, head, i] = max(float(out[layer, head, i]), float(weights[place]))
    return out


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("n", [5, 11, 12, 13, 24, 31])
def test_kvzip_scores(kv_heads: int, group: int, sinks: int, n: int) -> None:
    """Chunks of 12: one short of, at and behind a chunk's border, with and without sink keys of later chunks."""
    context = Context.random(Shape(2, kv_heads, kv_heads * group, 8), n)
    spec = MethodSpec("kvzip", sinks=sinks, recent=2, options=(("chunk", 12),))
    compressor = create(spec, context.shape, n)
    seen = drive(compressor, context)
    assert len(seen) == -(-n // 12)
    for index, probe in enumerate(seen):
        wanted = sorted({*range(min(sinks, n)), *range(12 * index, min(12 * index + 12, n))})
        assert [p.tolist() for p in probe.asked] == [wanted] * context.shape.layers
    torch.testing.assert_close(
        compressor.scorer.scores().double(), kvzip_reference(context, spec, seen), rtol=1e-4, atol=1e-7
    )


# -- selection and budget on their own -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", COUNTS)
@quick
@given(data=st.data())
def test_ties_go_to_the_smaller_index(mode: str, data: st.DataObject) -> None:
    """Few distinct scores, so that nearly every decision is a tie."""
    layers, heads, n = (data.draw(st.integers(1, high)) for high in (4, 3, 14))
    sinks, recent = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    levels = st.sampled_from([0.0, 0.0, 0.25, 0.5, -1.0])
    flat = data.draw(st.lists(levels, min_size=layers * heads * n, max_size=layers * heads * n))
    ratio = data.draw(st.floats(0.01, 1.0))
    scores = torch.tensor(flat).view(layers, heads, n)
    kept = select(scores, mode, ratio, sinks, recent)
    check_structure(kept, MethodSpec("fixed", mode, ratio, sinks, recent), Shape(layers, heads, heads, 8), n)
    assert heads_of(kept) == brute_force(scores, mode, kept_count(ratio, n, sinks, recent), sinks, recent)


@pytest.mark.parametrize("mode", COUNTS)
def test_equal_scores_keep_the_first_tokens(mode: str) -> None:
    kept = select(torch.zeros(1, 2, 20), mode, 0.4, sinks=1, recent=2)
    rest = 10 if mode == "per_head" else 5  # one global order: the first head takes all that is not forced
    assert heads_of(kept)[0][0] == [0, *range(1, 1 + rest), 18, 19]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 7, 19])
@pytest.mark.parametrize("mode", COUNTS)
def test_scores_that_are_not_finite_are_rejected(bad: float, position: int, mode: str) -> None:
    """Also at a forced position, whose score would never be read: it shows a broken scorer."""
    scores = torch.rand(2, 2, 20)
    scores[1, 0, position] = bad
    with pytest.raises(MethodError, match=r"fixed returned scores .* some not finite"):
        select(scores, mode, 0.4)


def test_scores_of_a_wrong_shape_are_rejected() -> None:
    scorer = Fixed(torch.rand(2, 2, 20), MethodSpec("fixed", ratio=0.5, sinks=1, recent=2))
    scorer.values = torch.rand(2, 1, 20)
    with pytest.raises(MethodError, match=r"shape \(2, 1, 20\), all finite; expected finite \(2, 2, 20\)"):
        Compressor(scorer, scorer.spec).select()


def test_kept_layer_is_the_layers_part() -> None:
    kept = select(torch.rand(3, 2, 30, generator=torch.Generator().manual_seed(0)), "per_head", 0.4)
    for layer, heads in enumerate(heads_of(kept)):
        assert kept.layer(layer).tolist() == [position for head in heads for position in head]


def test_top_positions_accepts_empty_heads() -> None:
    scores = torch.tensor([[[1.0, 3.0, 2.0], [3.0, 1.0, 2.0]]])
    assert top_positions(scores, torch.tensor([[0, 2]])).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("ratio", "n", "sinks", "recent", "expected"),
    [
        (0.25, 100, 4, 8, 25),
        (0.25, 102, 4, 8, 26),  # 25.5 rounds up
        (0.25, 101, 4, 8, 25),  # 25.25
        (0.25, 103, 4, 8, 26),  # 25.75
        (0.5, 5, 0, 1, 3),  # 2.5: half up, not to even
        (0.5, 7, 0, 1, 4),
        (0.01, 1000, 4, 32, 36),  # never fewer than the forced tokens
        (0.036, 1000, 4, 32, 36),
        (0.25, 20, 4, 32, 20),  # never more than there are
        (0.9, 36, 4, 32, 36),
        (1.0, 77, 4, 32, 77),
        (0.99, 37, 4, 32, 37),
        (0.25, 1, 4, 32, 1),
        (0.25, 0, 4, 32, 0),
    ],
)
def test_kept_count(ratio: float, n: int, sinks: int, recent: int, expected: int) -> None:
    assert kept_count(ratio, n, sinks, recent) == expected


@quick
@given(ratio=st.floats(0.001, 1), n=st.integers(0, 5000), sinks=st.integers(0, 40), recent=st.integers(1, 80))
def test_kept_count_is_the_rounded_share_within_its_limits(ratio: float, n: int, sinks: int, recent: int) -> None:
    kept = kept_count(ratio, n, sinks, recent)
    assert min(n, sinks + recent) <= kept <= n
    if sinks + recent < kept < n:
        assert abs(kept - ratio * n) <= 0.5
    assert kept <= kept_count(ratio, n + 1, sinks, recent) <= kept + 1
    assert kept <= kept_count(min(ratio * 1.1, 1.0), n, sinks, recent)


@quick
@given(n=st.integers(0, 20), sinks=st.integers(0, 25), recent=st.integers(1, 25))
def test_forced_mask(n: int, sinks: int, recent: int) -> None:
    assert forced_mask(n, sinks, recent).tolist() == [i < sinks or i >= n - recent for i in range(n)]


@quick
@given(data=st.data())
def test_per_layer_counts_fill_up_a_saturated_layer(data: st.DataObject) -> None:
    """One layer wants everything; its share is bounded by n and the rest still sums up exactly."""
    layers, heads, n = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(4, 12))
    budget = data.draw(st.integers(2, n))
    scores = torch.rand(layers, heads, n, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    scores[0] += 10
    scores = scores.masked_fill(forced_mask(n, 1, 1), math.inf)
    counts = allocate(scores, budget, "per_layer", 2)
    assert int(counts.sum()) == layers * heads * budget
    assert int(counts.min()) >= 2
    assert int(counts.max()) <= n


# -- registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_registered_methods_are_described_and_valid(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert set(method.counts) <= set(COUNTS)
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


def test_random_depends_on_its_seed_only() -> None:
    def positions(seed: int) -> list[int]:
        spec = MethodSpec("random", options=(("seed", seed),))
        return create(spec, SHAPE, 200).select().positions.tolist()

    assert positions(3) == positions(3)
    assert positions(3) != positions(4)


def test_streaming_llm_keeps_sinks_and_the_most_recent() -> None:
    kept = create(MethodSpec("streaming_llm", ratio=0.25), SHAPE, 200).select()
    assert heads_of(kept) == [[[0, 1, 2, 3, *range(154, 200)]] * SHAPE.kv_heads] * SHAPE.layers
