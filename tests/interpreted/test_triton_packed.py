"""Draft attention over packed pages against the arena's own in torch: ragged heads, folded pages, tails; on a GPU, or
on the CPU through Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from compressors import Kept, Rotary, Shape
from tests.tensor.arena_world import neox_rotary
from vericache.draft.arena import DraftArena
from vericache.draft.formats import page_format
from vericache.draft.source import LayerSource
from vericache.draft.triton_attention import Scratch, attend_arena, segment_starts
from vericache.draft.triton_step import write_tails

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's dot misreads bfloat16
SHAPE = Shape(layers=2, kv_heads=2, query_heads=6, head_dim=64)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def filled(form: str, page_tokens: int, dtype: torch.dtype, shape: Shape) -> tuple[list[DraftArena], list[int]]:
    """The same content in an arena on the CPU and in one with tables: slots of several counts, the last one folded; and
    the tail tokens of each slot."""
    pages = page_format(form, page_tokens, shape.head_dim, dtype)
    arenas = []
    for device in (torch.device("cpu"), DEVICE):
        rotary = Rotary(neox_rotary(shape.head_dim, 1e4, 512).cos_sin.to(device), neox=True)
        arenas.append(DraftArena(replace(shape, rotary=rotary), 600, pages, device))
    tables = arenas[1].with_tables(4, 1024)
    rng = torch.Generator().manual_seed(page_tokens)
    context, tails = 150, [0, 1, 2 * page_tokens + 3, page_tokens + 6]
    for slot, tail in enumerate(tails):
        counts = torch.randint(1, context, (shape.layers, shape.kv_heads), generator=rng)
        counts[0, 0] = context
        kept = [torch.randperm(context, generator=rng)[:c].sort().values for c in counts.flatten().tolist()]
        size = (2, shape.layers, shape.kv_heads, context + tail, shape.head_dim)
        kv = torch.randn(size, generator=rng).to(dtype)
        selection = Kept(counts, torch.cat(kept))
        for arena in arenas:
            mine = kv.to(arena.pool.bytes.device)
            device_selection = Kept(counts, selection.positions.to(mine.device))
            source = LayerSource(lambda layer, mine=mine: (mine[0, layer, :, :context], mine[1, layer, :, :context]))
            arena.put(slot, device_selection, source, context)
            if tail:
                arena.grow_tail(slot, tail)
        indices = list(range(tail))
        for layer in range(shape.layers) if tail else ():
            key, value = (x[layer][:, context:].transpose(0, 1).contiguous() for x in kv)
            arenas[0].write_tail(layer, arenas[0].tail_tokens(indices, [slot] * tail, indices), key, value)
            where = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([slot] * tail, indices)]
            write_tails(key.to(DEVICE), value.to(DEVICE), tables, layer, *where)
    for slot in (2, 3):
        strips = tails[slot] // page_tokens
        for arena in arenas:
            arena.fold(slot, strips)
        if pages.packed:
            tails[slot] -= strips * page_tokens
    codes, numbers = zip(*((arena.pool.bytes.cpu(), arena.pool.data.cpu().float()) for arena in arenas), strict=True)
    differ = codes[0] != codes[1] if pages.packed else (numbers[0] - numbers[1]).abs() > 1e-3
    assert differ.float().mean() < 1e-3, "a GPU may round a few numbers otherwise"
    arenas[1].pool.bytes.copy_(codes[0])
    return arenas, tails


@pytest.mark.parametrize("form", ["turboquant4", "turboquant3", "turboquant2", "kivi4", "kivi2", "kvquant4"])
@pytest.mark.parametrize("programs", [1, 7])
def test_packed_attention(form: str, programs: int) -> None:
    check(form, 64, torch.float32, SHAPE, programs)


@pytest.mark.parametrize("form", ["turboquant4", "kivi2"])
def test_half_precision(form: str) -> None:
    check(form, 32, HALF, Shape(1, 2, 8, 64), 5)


@pytest.mark.parametrize("page_tokens", [32, 128, 256])
def test_page_sizes(page_tokens: int) -> None:
    """Pages of few tokens, and of more than one tensor core takes."""
    check("turboquant4", page_tokens, torch.float32, Shape(1, 2, 4, 128), 3)


def check(form: str, page_tokens: int, dtype: torch.dtype, shape: Shape, programs: int) -> None:
    (reference, arena), tails = filled(form, page_tokens, dtype, shape)
    slots = [2, -1, 0, 3, 1]
    lengths = [tails[s] if s >= 0 else 0 for s in slots]
    rng = torch.Generator().manual_seed(7)
    query = torch.randn(len(slots), shape.query_heads, shape.head_dim, generator=rng).to(dtype)
    tables, scale = arena.tables, shape.head_dim**-0.5
    assert tables is not None
    row_slot, tail_len = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, lengths))
    starts = segment_starts(tables, row_slot, tail_len)
    scratch = Scratch.of(programs, len(slots), shape.kv_heads, shape.group, tables.format, DEVICE, 1)
    tokens = torch.arange(len(slots), dtype=torch.int32, device=DEVICE)
    drafts = [i for i, s in enumerate(slots) if s >= 0]
    work = reference.work([slots[i] for i in drafts], [lengths[i] for i in drafts])
    for layer in range(shape.layers):
        wanted = reference.attend(layer, work, query[drafts], scale)
        output = torch.full_like(query, 7.0, device=DEVICE)
        attend_arena(query.to(DEVICE), output, tables, layer, row_slot, tail_len, tokens, starts, scratch, scale)
        error = (output.cpu().float()[drafts] - wanted).abs().max()
        assert error < TOLERANCE[dtype], (layer, error)
        assert (output[1] == 7.0).all()
