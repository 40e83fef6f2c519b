"""What KVzip asks to see and how it scores, against an explicit formula."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressors import METHODS, MethodSpec, Shape, create
from tests.tensor.compressor_runs import Context, SeenProbe, drive, quick


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
