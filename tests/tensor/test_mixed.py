"""Pages of TurboQuant's codes with a width per token or per layer, against a rounding of single tokens."""

from dataclasses import replace

import pytest
import torch

from compressors import Kept, Shape
from compressors.bits import WIDTHS, Pair
from tests.packings import by_layer, by_token, kept_bits, mixed, narrowed
from tests.tensor.arena_world import Tokens, append, attend_all, dense, generator, random_kept
from vericache.draft.arena import DraftArena
from vericache.draft.formats import LayerTokens, Mixed, page_format, pages_per_head

PT, N, DIM = 32, 70, 64
SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=DIM)
LAYER_BITS = [(3, 2), (16, 4)]


def form_of(layer_bits: list[Pair] | None = None, dtype: torch.dtype = torch.float32, dim: int = DIM) -> Mixed:
    form = page_format("turboquant_mixed", PT, dim, dtype, layer_bits or ())
    assert isinstance(form, Mixed)
    return form


def with_bits(kept: Kept, seed: int = 5) -> Kept:
    chosen = torch.randint(0, len(WIDTHS), (len(kept.positions),), generator=generator(seed))
    return replace(kept, bits=torch.tensor(WIDTHS, dtype=torch.uint8)[chosen])


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("layer", [0, 1])
def test_rounded_tokens_are_the_oracles(dim: int, layer: int) -> None:
    rng = generator(dim)
    keys, values = (torch.randn(3, PT, dim, generator=rng) + 5 * torch.randn(dim, generator=rng) for _ in range(2))
    positions = torch.arange(3 * PT).view(3, PT)
    tokens = LayerTokens(keys, values, positions >= 0, positions, torch.zeros(3, dtype=torch.int64))
    form, shape = form_of(LAYER_BITS, dim=dim), Shape(2, 1, 1, dim)
    frozen = form.freeze(layer, tokens, shape)
    bits = torch.tensor([0, *WIDTHS], dtype=torch.uint8)[torch.randint(0, 5, (3, PT), generator=rng)]
    for given in (None, bits):
        got = form.rounded(replace(tokens, bits=given), frozen)
        for side, x in enumerate((keys, values)):
            width = torch.full((3, PT), LAYER_BITS[layer][side]) if given is None else given.long()
            wanted = narrowed(x.flatten(0, 1), width.flatten().clamp(min=2)).view(x.shape)
            wanted[width == 0] = 0
            wrong = ~torch.isclose(got[:, side], wanted, rtol=1e-4, atol=1e-4).all(-1)
            assert wrong.sum() <= 1, "a number in the middle between two levels may go to either"
            assert torch.equal(got[:, side][width == 16], x[width == 16])


@pytest.mark.parametrize("layer_bits", [None, LAYER_BITS])
@pytest.mark.parametrize("folds", [0, 2])
def test_a_slot_reads_tokens_in_their_widths(layer_bits: list[Pair] | None, folds: int) -> None:
    """Those of the context in the compressor's, folded ones behind it in their layer's, the others exact."""
    arena = DraftArena(SHAPE, 200, form_of(layer_bits))
    source, kept = Tokens.random(SHAPE, N + 3 * PT, 1), with_bits(random_kept(SHAPE, N, 2))
    arena.put(0, kept, source.read(N), N)
    append(arena, 0, source, N, range(2 * PT + 5))
    arena.fold(0, folds)
    lossy = Tokens(source.keys.clone(), source.values.clone())
    packing = mixed(by_token(kept_bits(kept, N), by_layer(layer_bits or [(4, 4)] * 2)), PT, 0)
    query = torch.randn(SHAPE.layers, 1, SHAPE.query_heads, DIM, generator=generator(3))
    got = attend_all(arena, [0], [2 * PT + 5], query)
    for layer in range(SHAPE.layers):
        pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
        packing.pack_layer(layer, lossy.keys[layer], lossy.values[layer], pieces, torch.arange(N, N + folds * PT))
        wanted = dense(SHAPE, lossy, kept, N, 2 * PT + 5, query[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_if_pages_were_packed(dtype: torch.dtype) -> None:
    """Codes and a scale for keys and values, whole pages of one head and one pair of widths, their table entries, and
    how many tokens each head has of a pair."""
    wide = 8 * dtype.itemsize

    def page(keys: int, values: int) -> float:
        return sum(PT * (DIM * (wide if b == 16 else b) / 8 + 2 * (b < 16)) for b in (keys, values)) + 4

    kept = random_kept(SHAPE, 200, 7)
    need = pages_per_head(kept.counts, PT).sum(1).tolist()
    assert form_of(None, dtype).packed_bytes(kept) == 4 * 4 + sum(need) * page(4, 4)
    by_layers = sum(n * page(*pair) for n, pair in zip(need, LAYER_BITS, strict=True))
    assert form_of(LAYER_BITS, dtype).packed_bytes(kept) == 4 * 4 + by_layers
    kept = with_bits(kept)
    grid = kept_bits(kept, 200)
    by_tokens = sum(int(pages_per_head((grid == b).sum(-1), PT).sum()) * page(b, b) for b in WIDTHS)
    for form in (form_of(None, dtype), form_of(LAYER_BITS, dtype)):
        assert form.packed_bytes(kept) == 4 * 4 * len(WIDTHS) + by_tokens
    arena = DraftArena(SHAPE, 200, form_of(None, dtype))
    arena.put(0, kept, Tokens.random(SHAPE, 200, 1, dtype).read(200), 200)
    rounding = arena.slots[0].rounding
    assert rounding is not None
    assert rounding.packed_bytes == 4 * 4 * len(WIDTHS) + by_tokens
