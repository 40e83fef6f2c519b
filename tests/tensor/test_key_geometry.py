"""Methods that look at keys and values alone, or at the queries' direction, token by token against their formulas."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressors import MethodError, MethodSpec, create, validate
from tests.tensor.compressor_runs import SHAPE, Context, drive, heads_of, quick, shape_of

GRID = [(1, 1, 64), (1, 4, 80), (3, 1, 16), (2, 3, 80)]


def scores_of(context: Context, spec: MethodSpec) -> Tensor:
    compressor = create(spec, context.shape, len(context.tokens))
    drive(compressor, context)
    assert compressor.reads_cache == compressor.scorer.reads_cache, "a context within the forced tokens is not read"
    return compressor.scorer.scores()


@pytest.mark.parametrize(("kv_heads", "group", "dim"), GRID)
@pytest.mark.parametrize("logits", [1 << 23, 700])
def test_knorm(kv_heads: int, group: int, dim: int, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressors.cached.LOGITS", logits)
    context = Context.random(shape_of(2, kv_heads, group, dim), 45)
    wanted = [[[-math.dist(k, [0.0] * dim) for k in head] for head in layer] for layer in context.keys.tolist()]
    torch.testing.assert_close(scores_of(context, MethodSpec("knorm")), torch.tensor(wanted))


@pytest.mark.parametrize(("kv_heads", "group", "dim"), GRID)
@pytest.mark.parametrize("logits", [1 << 23, 700])
def test_keydiff(kv_heads: int, group: int, dim: int, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressors.cached.LOGITS", logits)
    context = Context.random(shape_of(2, kv_heads, group, dim), 45)
    unit = context.keys.double() / context.keys.double().norm(dim=-1, keepdim=True)
    anchor = unit.mean(2, keepdim=True)
    wanted = -(unit * anchor).sum(-1) / anchor.norm(dim=-1)
    torch.testing.assert_close(scores_of(context, MethodSpec("keydiff")).double(), wanted, rtol=1e-4, atol=1e-6)


def lagkv_reference(keys: Tensor, values: Tensor, sinks: int, lag: int) -> list[float]:
    """One head, token by token: ``keys`` and ``values`` float64 ``[n, D]``."""
    n = len(keys)
    out = [1 + i / n for i in range(n)]
    starts = list(range(sinks, n - lag + 1, lag))
    for start, following in pairwise(starts):
        share = [0.0] * lag
        for x in (keys, values):
            after = x[following : following + lag]
            low, high = after.min(0).values, after.max(0).values
            spread = [float(((x[start + i] - low) / (high - low)).std()) for i in range(lag)]
            total = sum(math.exp(s) for s in spread)
            share = [a + math.exp(s) / total for a, s in zip(share, spread, strict=True)]
        for i in range(lag):
            out[start + i] = sum(other < share[i] for other in share) / lag
    return out


@pytest.mark.parametrize(("kv_heads", "group", "dim"), GRID)
@pytest.mark.parametrize(
    ("n", "lag", "sinks"), [(45, 8, 4), (40, 9, 4), (44, 10, 4), (41, 41, 0), (39, 20, 0), (90, 44, 2)]
)
@pytest.mark.parametrize("logits", [1 << 23, 7000])
def test_lagkv(
    kv_heads: int, group: int, dim: int, n: int, lag: int, sinks: int, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and broken last parts, too few parts for a comparison; in several runs."""
    monkeypatch.setattr("compressors.lagkv.LOGITS", logits)
    context = Context.random(shape_of(2, kv_heads, group, dim), n)
    spec = MethodSpec("lagkv", sinks=sinks, options=(("lag", lag),))
    wanted = [
        [lagkv_reference(k, v, sinks, lag) for k, v in zip(keys, values, strict=True)]
        for keys, values in zip(context.keys.double(), context.values.double(), strict=True)
    ]
    torch.testing.assert_close(scores_of(context, spec), torch.tensor(wanted), rtol=1e-5, atol=0)


def test_lagkv_of_channels_that_do_not_vary() -> None:
    context = Context.random(SHAPE, 60)
    context.keys[..., 3] = 0.0
    context.values[..., 20:40, :] = 1.5
    scores = scores_of(context, MethodSpec("lagkv", options=(("lag", 8),)))
    assert torch.isfinite(scores).all()


def test_a_short_context_keeps_its_most_recent() -> None:
    context = Context.random(SHAPE, 150)
    compressor = create(MethodSpec("lagkv"), SHAPE, 150)
    drive(compressor, context)
    kept = [*range(4), *range(116, 150)]
    assert heads_of(compressor.select()) == [[kept] * SHAPE.kv_heads] * SHAPE.layers


@pytest.mark.parametrize(("kv_heads", "group", "dim"), GRID)
@pytest.mark.parametrize("queries", [1, 30, 1024])
def test_qfilter(kv_heads: int, group: int, dim: int, queries: int) -> None:
    context = Context.random(shape_of(2, kv_heads, group, dim), 45, sharpness=1.0)
    context.queries += torch.linspace(-2, 1, dim)  # off centre, as a model's are
    wanted = torch.zeros(2, kv_heads, 45, dtype=torch.float64)
    for layer in range(2):
        for head in range(kv_heads * group):
            q = context.queries[layer, head, max(45 - queries, 0) :].double()
            u, _, v = torch.linalg.svd(q, full_matrices=False)
            direction = v[0] * u[:, 0].sum().sign()  # the sign under which projections are positive on average
            wanted[layer, head // group] += context.keys[layer, head // group].double() @ direction / group
    found = scores_of(context, MethodSpec("qfilter", options=(("queries", queries),))).double()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@quick
@given(n=st.integers(37, 120), lag=st.integers(1, 130), sinks=st.integers(0, 4))
def test_every_part_keeps_as_much(n: int, lag: int, sinks: int) -> None:
    """LagKV's ranks: each compared part holds every rank once, so that one threshold cuts all parts alike."""
    scores = scores_of(Context.random(SHAPE, n), MethodSpec("lagkv", sinks=sinks, options=(("lag", lag),)))
    parts = max((n - sinks) // lag - 1, 0)
    last = sinks + parts * lag
    ranks = scores[..., sinks:last].reshape(SHAPE.layers, SHAPE.kv_heads, parts, lag)
    assert torch.equal(ranks.sort(-1).values, (torch.arange(lag) / lag).expand_as(ranks))
    assert (scores[..., last:].diff() > 0).all()


def test_wrong_options() -> None:
    with pytest.raises(MethodError, match="lagkv: option 'lag' must be at least 1, got 0"):
        validate(MethodSpec("lagkv", options=(("lag", 0),)))
    with pytest.raises(MethodError, match="qfilter: option 'queries' must be at least 1, got 0"):
        validate(MethodSpec("qfilter", options=(("queries", 0),)))
