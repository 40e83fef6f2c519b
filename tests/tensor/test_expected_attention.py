"""Expected Attention against its formula, written out with rotation matrices, query head by query head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressors import METHODS, MethodError, MethodSpec, Rotary, Shape, create, validate
from tests.tensor.compressor_runs import SHAPE, Context, drive, rotary, shape_of


def rotation(rope: Rotary, position: int, dim: int) -> Tensor:
    """R_p, float64 ``[D, D]``: columns are what the unit vectors become."""
    half = rope.cos_sin.shape[-1] // 2
    cos, sin = rope.cos_sin[position].double().chunk(2)
    out = torch.eye(dim, dtype=torch.float64)
    for i in range(half):
        a, b = (i, i + half) if rope.neox else (2 * i, 2 * i + 1)
        out[a, a] = out[b, b] = cos[i]
        out[b, a], out[a, b] = sin[i], -sin[i]
    return out


def reference(context: Context, spec: MethodSpec) -> Tensor:
    """float64 ``[L, H, n]``, by ``repeat_kv`` and the full softmax."""
    shape, n, dim = context.shape, len(context.tokens), context.shape.head_dim
    assert shape.rotary is not None
    queries, future, epsilon = (METHODS[spec.name].option(spec, name) for name in METHODS[spec.name].options)
    table = len(shape.rotary.cos_sin)
    ahead = [p for p in range(n, n + future) if p < table] or [table - 1]
    mean_rotation = torch.stack([rotation(shape.rotary, p, dim) for p in ahead]).mean(0)
    seen = range(max(n - queries, spec.sinks), n)
    turns = [rotation(shape.rotary, p, dim) for p in seen]
    out = torch.zeros(shape.layers, shape.kv_heads, n, dtype=torch.float64)
    for layer in range(shape.layers):
        for head in range(shape.query_heads):
            q = context.queries[layer, head].double()
            still = torch.stack([torch.linalg.solve(turn, q[p]) for p, turn in zip(seen, turns, strict=True)])
            mean, covariance = (
                mean_rotation @ still.mean(0),
                mean_rotation @ still.T.cov(correction=0) @ mean_rotation.T,
            )
            k = context.keys[layer, head // shape.group].double()[spec.sinks :]
            v = context.values[layer, head // shape.group].double()[spec.sinks :]
            z = torch.stack([mean @ x * context.scale + x @ covariance @ x * context.scale**2 / 2 for x in k])
            out[layer, head // shape.group, spec.sinks :] += (z.softmax(0) + epsilon / 1000) * v.norm(dim=-1)
    return out / shape.group


def check(context: Context, spec: MethodSpec) -> None:
    compressor = create(spec, context.shape, len(context.tokens))
    drive(compressor, context)
    found = compressor.scorer.scores()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference(context, spec), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_scores(kv_heads: int, group: int, dim: int) -> None:
    check(Context.random(shape_of(2, kv_heads, group, dim), 45, sharpness=1.0), MethodSpec("expected_attention"))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rot", [8, 16])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_partial_rotation_both_styles_and_a_scaled_table(rot: int, neox: bool, factor: float) -> None:
    rope = rotary(rot, neox)
    rope = replace(rope, cos_sin=factor * rope.cos_sin)
    check(Context.random(replace(SHAPE, rotary=rope), 40, sharpness=1.0), MethodSpec("expected_attention"))


@pytest.mark.parametrize("n", [1, 4, 5, 6, 30])
@pytest.mark.parametrize("options", [(("queries", 1),), (("queries", 7), ("epsilon_permille", 0)), (("future", 3),)])
def test_short_contexts_and_few_queries(n: int, options: tuple[tuple[str, int], ...]) -> None:
    spec = MethodSpec("expected_attention", options=options)
    context = Context.random(SHAPE, n, sharpness=1.0)
    if n > spec.sinks:
        check(context, spec)
    else:
        drive(create(spec, SHAPE, n), context)


@pytest.mark.parametrize("n", [39, 40])
def test_the_end_of_the_models_positions(n: int) -> None:
    """At most the last position is still ahead."""
    shape = replace(SHAPE, rotary=rotary(16, positions=40))
    check(Context.random(shape, n, sharpness=1.0), MethodSpec("expected_attention"))


def test_runs_of_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressors.cached.LOGITS", 7 * 6 * 16)
    check(Context.random(SHAPE, 40, sharpness=1.0), MethodSpec("expected_attention"))


def test_queries_that_are_all_alike_are_expected_exactly() -> None:
    """No variance and one position ahead: the expected attention is the next query's attention."""
    context, n = Context.random(SHAPE, 50), 50
    assert SHAPE.rotary is not None
    still = torch.randn(SHAPE.layers, SHAPE.query_heads, 1, 16, generator=torch.Generator().manual_seed(3))
    context.queries = SHAPE.rotary.turn(still.expand(-1, -1, n, -1), torch.arange(n))
    spec = MethodSpec("expected_attention", options=(("epsilon_permille", 0), ("future", 1)))
    compressor = create(spec, SHAPE, n)
    drive(compressor, context)
    following = SHAPE.rotary.turn(still, torch.tensor([n]))  # [L, Hq, 1, D]
    keys = context.keys[:, :, 4:].repeat_interleave(SHAPE.group, 1)
    attention = (following @ keys.transpose(2, 3) * context.scale).softmax(-1)
    attention = attention.view(SHAPE.layers, SHAPE.kv_heads, SHAPE.group, -1).mean(2)
    wanted = attention * context.values[:, :, 4:].norm(dim=-1)
    torch.testing.assert_close(compressor.scorer.scores()[..., 4:], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("option", "value"), [("queries", 0), ("future", 0), ("epsilon_permille", -1)])
def test_wrong_options(option: str, value: int) -> None:
    with pytest.raises(MethodError, match=f"expected_attention: option '{option}' must be at least"):
        validate(MethodSpec("expected_attention", options=((option, value),)))


def test_a_model_whose_rotation_is_unknown() -> None:
    with pytest.raises(MethodError, match="expected_attention turns keys and queries"):
        create(MethodSpec("expected_attention"), Shape(3, 2, 6, 16), 50)
