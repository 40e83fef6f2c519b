"""Scoring and filling on vLLM's pages, against the same in torch."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from compressors import Asked, Kept
from vericache.draft.formats import pages_per_head
from vericache.draft.source import LayerSource
from vericache.engine.pages import PageLayout
from vericache.engine.pages_cuda import SideBySideLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BLOCK, LAYERS = 16, 2


def pages(heads: int, dim: int, count: int, rng: torch.Generator) -> list[Tensor]:
    """KV caches whose blocks hold tokens before heads, as FlashAttention's do; beyond the sequence they are NaN."""
    size = (LAYERS, count + 3, BLOCK, heads, 2 * dim)
    data = torch.randn(size, generator=rng).to(DEVICE, HALF).transpose(2, 3)
    return list(data)


def sequence(caches: list[Tensor], tokens: int, rng: torch.Generator) -> Tensor:
    """The sequence's blocks in random order; nothing else may be read."""
    blocks = torch.randperm(len(caches[0]), generator=rng)[: -(-tokens // BLOCK)].to(DEVICE)
    for cache in caches:
        others = torch.ones(len(cache), dtype=torch.bool, device=DEVICE)
        others[blocks] = False
        cache[others] = float("nan")
        cache[blocks[-1], :, (tokens - 1) % BLOCK + 1 :] = float("nan")
    return blocks


@pytest.mark.parametrize(
    ("tokens", "window", "heads", "group", "dim"),
    [(700, 32, 2, 3, 64), (1100, 8, 1, 4, 16), (33, 32, 3, 1, 32), (32, 32, 1, 2, 16), (600, 70, 1, 2, 16)],
)
def test_the_last_queries_of_a_context(tokens: int, window: int, heads: int, group: int, dim: int) -> None:
    """As SnapKV asks. Several chunks, one that the first queries hardly see, more queries than a product holds."""
    compare(tokens, window, heads, group, dim, Asked(0, tokens - window))


@pytest.mark.parametrize(("start", "stop", "sinks"), [(0, 130, 0), (130, 260, 4), (260, 300, 4), (2, 6, 2)])
def test_a_row_behind_the_context(start: int, stop: int, sinks: int) -> None:
    """As KVzip asks, chunk by chunk."""
    compare(300, 90, 2, 2, 32, Asked(start, stop, sinks, "max"))


@pytest.mark.parametrize(("start", "rows"), [(0, 90), (130, 90), (200, 1), (0, 1)])
@pytest.mark.parametrize(("sinks", "reduce"), [(0, "mean"), (0, "max"), (3, "mean")])
def test_what_a_rows_own_tokens_receive(start: int, rows: int, sinks: int, reduce: Literal["mean", "max"]) -> None:
    """As H2O asks: a row in the middle of a context, and at its start, where nothing is cached before it."""
    sinks = min(sinks, start)
    compare(300, rows, 2, 2, 32, Asked(sinks, start, sinks, reduce, own=True))


def compare(tokens: int, rows: int, heads: int, group: int, dim: int, asked: Asked) -> None:
    rng = torch.Generator().manual_seed(tokens)
    caches = pages(heads, dim, -(-tokens // BLOCK), rng)
    blocks = sequence(caches, tokens, rng)
    query = 2 * torch.randn(rows, heads * group, dim, generator=rng).to(DEVICE, HALF)
    key = torch.randn(rows, 2 * heads, dim, generator=rng).to(DEVICE, HALF)[:, heads:]  # a slice, as of a QKV product
    layout = SideBySideLayout(caches, BLOCK, dim)
    with DEVICE:
        found = layout.tokens(caches[1], blocks).attention_received(query, key, asked, dim**-0.5)
        reference = PageLayout.tokens(layout, caches[1], blocks)  # the same in torch
        wanted = reference.attention_received(query, key, asked, dim**-0.5)
    assert found.shape == (heads, asked.answers(rows))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("most", [5, 90])
def test_fill(page_tokens: int, most: int) -> None:
    """Ragged heads, one of which keeps nothing; bit by bit, and no page beside."""
    tokens, heads, dim = 90, 3, 32
    rng = torch.Generator().manual_seed(most)
    caches = pages(heads, dim, -(-tokens // BLOCK), rng)
    blocks = sequence(caches, tokens, rng)
    layout = SideBySideLayout(caches, BLOCK, dim)
    counts = torch.randint(1, most + 1, (LAYERS, heads), generator=rng)
    counts[1, 1] = 0
    kept = [torch.randperm(tokens, generator=rng)[:c].sort().values for c in counts.flatten().tolist()]
    selection = Kept(counts, torch.cat(kept).to(DEVICE))
    need = pages_per_head(counts, page_tokens)
    total = int(need.sum())
    ids = torch.randperm(total + 5, generator=rng)[:total].int()
    pools = [torch.zeros(total + 5, 2, page_tokens, dim, device=DEVICE, dtype=HALF) for _ in range(2)]
    layout.source(caches, blocks, tokens).fill(pools[0], ids, selection, need, range(LAYERS))
    everything = torch.arange(tokens, device=DEVICE)
    LayerSource(lambda i: layout.read(caches[i], blocks, everything)).fill(
        pools[1], ids, selection, need, range(LAYERS)
    )
    assert torch.equal(*pools)
    assert int(pools[0].count_nonzero()) == int(counts.sum()) * 2 * dim


def test_pages_must_be_alike() -> None:
    with pytest.raises(ValueError, match="same in all layers"):
        SideBySideLayout([torch.zeros(4, 2, 8, 32), torch.zeros(4, 8, 2, 32).transpose(1, 2)], 8, 16)
