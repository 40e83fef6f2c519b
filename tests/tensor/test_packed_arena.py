"""Slots of packed pages: what follows the context is folded, rolled back and read as the format loses it."""

import pytest
import torch

from compressors import Kept, Shape
from tests.packings import Packing, by_layer, kivi, kvquant, mixed, rotatekv, turboquant
from tests.tensor.arena_world import Tokens, append, attend_all, dense, generator, neox_rotary, random_kept
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Simulated, page_format
from vericache.errors import CompressionError

THETA = 1e4
SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=64, rotary=neox_rotary(64, THETA, 256))
N, PT = 70, 32
LAYER_BITS = [(4, 2), (16, 3)]
ORACLES = {
    "turboquant4": turboquant(4, PT, 0),
    "kivi2": kivi(2, PT, 0),
    "rotatekv4": rotatekv(4, PT, 0),
    "rotatekv2": rotatekv(2, PT, 0),
    "kvquant4": kvquant(4, PT, 0, THETA),
    "kvquant2": kvquant(2, PT, 0, THETA),
    "turboquant_mixed": mixed(by_layer(LAYER_BITS), PT, 0),
}
QUERY = torch.randn(SHAPE.layers, 1, SHAPE.query_heads, SHAPE.head_dim, generator=generator(3))


def filled(name: str) -> tuple[DraftArena, Tokens, Kept]:
    arena = DraftArena(SHAPE, 200, page_format(name, PT, SHAPE.head_dim, torch.float32, LAYER_BITS))
    source, kept = Tokens.random(SHAPE, N + 4 * PT, 1), random_kept(SHAPE, N, 2)
    arena.put(0, kept, source.read(N), N)
    return arena, source, kept


def fold(arena: DraftArena, strips: int) -> int:
    """Returns by how much the tail becomes shorter."""
    arena.fold(0, strips)
    return strips * PT if arena.format.packed else 0


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("folds", [[], [1], [2], [1, 1]])
def test_slots_read_what_their_format_keeps(name: str, folds: list[int]) -> None:
    """One fold of two pages equals two folds of one; what is not folded stays exact."""
    arena, source, kept = filled(name)
    append(arena, 0, source, N, range(2 * PT + 5))
    left = 2 * PT + 5 - sum(fold(arena, strips) for strips in folds)
    lossy = lost(source, kept, sum(folds) * PT, ORACLES[name])
    got = attend_all(arena, [0], [left], QUERY)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, lossy, kept, N, 2 * PT + 5, QUERY[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-2, atol=2e-3)


def lost(source: Tokens, kept: Kept, folded: int, packing: Packing) -> Tokens:
    """The tokens of which the context's kept ones and the ``folded`` first behind it are packed."""
    out = Tokens(source.keys.clone(), source.values.clone())
    for layer in range(SHAPE.layers):
        pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
        packing.pack_layer(layer, out.keys[layer], out.values[layer], pieces, torch.arange(N, N + folded))
    return out


@pytest.mark.parametrize("name", ORACLES)
def test_a_rejected_draft_leaves_nothing(name: str) -> None:
    """Bit for bit: drafts behind verified tokens, rolled back before these are folded, and the pages they took."""
    rolled, source, _ = filled(name)
    never, _, _ = filled(name)
    for arena in (rolled, never):
        append(arena, 0, source, N, range(PT + 3))
    append(rolled, 0, Tokens.random(SHAPE, N + 3 * PT, 9), N, range(PT + 3, 2 * PT + 7))
    for arena in (rolled, never):
        gone = fold(arena, 1)
        append(arena, 0, source, N + gone, range(PT + 3 - gone, PT + 9 - gone))
    assert torch.equal(*(attend_all(arena, [0], [PT + 9 - gone], QUERY) for arena in (rolled, never)))


@pytest.mark.parametrize("name", ORACLES)
def test_verified_tokens_that_are_not_finite_harm_nobody_else(name: str) -> None:
    """A fold cannot be refused; whoever drafts on such tokens drafts nonsense, and no step fails."""
    arena, source, _ = filled(name)
    source.keys[:, :, N + 2, 7], source.values[:, :, N + 5] = float("nan"), float("inf")
    append(arena, 0, source, N, range(PT + 1))
    left = PT + 1 - fold(arena, 1)
    assert attend_all(arena, [0], [left], QUERY).isfinite().all()


@pytest.mark.parametrize("name", ORACLES)
def test_bytes_of_slots(name: str) -> None:
    """Pages, tables and counts, and what is frozen where pages are simulated; all of it is given back."""
    arena, source, kept = filled(name)
    append(arena, 0, source, N, range(PT))
    arena.fold(0, 1)
    held, form = arena.slots[0], arena.format
    pages = [held.pages, held.folded, held.tail]
    beside = form.frozen_bytes(SHAPE.layers, SHAPE.kv_heads) + held.counts.nbytes
    assert arena.bytes_held == beside + sum(p.numel() * form.page_bytes + p.nbytes for p in pages)
    packed = form.packed_bytes(kept) if isinstance(form, Simulated) else len(held.pages) * form.page_bytes
    assert packed - beside < len(held.pages) * 2 * PT * SHAPE.head_dim * 4 / (6 if name != "turboquant_mixed" else 3)
    arena.drop(0)
    assert arena.bytes_held == 0


def test_a_context_that_cannot_be_packed_leaves_the_slot_empty() -> None:
    for name in ("rotatekv4", "kvquant3"):
        arena, source, kept = filled(name)
        source.keys[1, :, :N] = float("nan")
        with pytest.raises(CompressionError, match="not finite"):
            arena.put(0, kept, source.read(N), N)
        assert not arena.slots
        assert len(arena.pool.free) == 200
