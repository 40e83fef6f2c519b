"""Slots of packed pages: what follows the context is folded, rolled back and read as the format loses it."""

from collections.abc import Callable

import pytest
import torch

from compressors import Kept, Shape
from tests.packings import Packing, kivi, rotatekv, turboquant
from tests.tensor.arena_world import Tokens, append, attend_all, dense, generator, random_kept
from vericache.draft.arena import DraftArena
from vericache.draft.formats import page_format

SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=64)
N, PT = 70, 32
ORACLES: dict[str, Callable[[int, int, int], Packing]] = {
    "turboquant4": turboquant, "kivi2": kivi, "rotatekv4": rotatekv, "rotatekv2": rotatekv
}  # fmt: skip
QUERY = torch.randn(SHAPE.layers, 1, SHAPE.query_heads, SHAPE.head_dim, generator=generator(3))


def filled(name: str) -> tuple[DraftArena, Tokens, Kept]:
    arena = DraftArena(SHAPE, 200, page_format(name, PT, SHAPE.head_dim, torch.float32))
    source, kept = Tokens.random(SHAPE, N + 4 * PT, 1), random_kept(SHAPE, N, 2)
    arena.put(0, kept, source.read(N))
    return arena, source, kept


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("folds", [[], [1], [2], [1, 1]])
def test_slots_read_what_their_format_keeps(name: str, folds: list[int]) -> None:
    """One fold of two pages equals two folds of one; what is not folded stays exact."""
    arena, source, kept = filled(name)
    append(arena, 0, source, N, range(2 * PT + 5))
    for strips in folds:
        arena.fold(0, strips)
    packed, lossy = sum(folds) * PT, lost(source, kept, sum(folds) * PT, ORACLES[name](int(name[-1]), PT, 0))
    got = attend_all(arena, [0], [2 * PT + 5 - packed], QUERY)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, lossy, kept, N, 2 * PT + 5, QUERY[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-2, atol=2e-3)


def lost(source: Tokens, kept: Kept, folded: int, packing: Packing) -> Tokens:
    """The tokens of which the context's kept ones and the ``folded`` first behind it are packed."""
    out = Tokens(source.keys.clone(), source.values.clone())
    for layer in range(SHAPE.layers):
        pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
        for head, piece in enumerate(pieces):
            for where in (piece, torch.arange(N, N + folded)):
                if len(where):
                    k, v = packing.lose(source.keys[layer, head, where], source.values[layer, head, where])
                    out.keys[layer, head, where], out.values[layer, head, where] = k, v
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
        arena.fold(0, 1)
        append(arena, 0, source, N + PT, range(3, 9))
    assert torch.equal(attend_all(rolled, [0], [9], QUERY), attend_all(never, [0], [9], QUERY))


@pytest.mark.parametrize("name", ORACLES)
def test_verified_tokens_that_are_not_finite_harm_nobody_else(name: str) -> None:
    """A fold cannot be refused; whoever drafts on such tokens drafts nonsense, and no step fails."""
    arena, source, _ = filled(name)
    source.keys[:, :, N + 2, 7], source.values[:, :, N + 5] = float("nan"), float("inf")
    append(arena, 0, source, N, range(PT + 1))
    arena.fold(0, 1)
    assert attend_all(arena, [0], [1], QUERY).isfinite().all()
