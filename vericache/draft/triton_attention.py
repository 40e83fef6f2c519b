"""Draft attention over head pages as a Triton kernel, balanced over ragged heads and fit for CUDA graphs.

A *segment* is one (batch row, KV head): the head's kept pages, then the row's tail pages, in the arena's page table.
Heads of one layer differ 50-fold in length: a grid over segments would leave most of a GPU idle. Instead all pages of a
layer are laid end to end and cut into equal shares, one per program of a fixed grid (stream-K), none of them so small
that its result costs more to merge than to make. A program walks its share, writes segments that lie in it whole, and
leaves partial softmax sums of the others in a scratch buffer; a second kernel merges those by log-sum-exp. Grid and
buffers depend on capacities only and lengths are read on the device, so a captured graph replays whatever the rows
are. A row without a slot (-1) has no pages; its output is left alone.

Where pages are packed, segments and shares are of packed pages only. Their results stay in the space of the codes, and
the second kernel turns them back and goes on with the tail, which is short: a program that does either in between keeps
all others waiting.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vericache.draft.formats import PageFormat
from vericache.draft.tables import ArenaTables
from vericache.draft.triton_finish import finish, merge, turn_queries
from vericache.draft.triton_unpack import kivi_tiles, plain_tiles, turbo_tiles

RESERVED = 16  # places left free for copies
TILE_ELEMENTS = 8192  # of keys that a program holds at a time; pages that are smaller are read several at once
TAIL_TILE = 16  # tokens behind packed pages: few, and what is read at once takes memory that other programs need
WARPS, STAGES = 4, 3
SHARE_TILES = 4  # a program's least share
TURBO = 1  # the kind of page that takes ...
TURBO_REGISTERS, TURBO_WARPS = 168, 12  # ... so many a thread, which leaves a processor room for so many warps


@dataclass(frozen=True)
class Scratch:
    """What the kernels of a layer hand on; one for all layers. Also fixes the number of programs and their least share,
    in tiles.

    Partial results: ``acc`` float32 ``[places, G, D]`` and ``stats`` float32 ``[places, 2, G]`` (maximum and sum). Two
    places for each program, for what it cuts at the beginning and at the end of its share; where pages are packed, one
    more for each segment that a program reads whole. ``turned`` ``[R, Hq, D]``: queries in the space of the codes.
    """

    acc: Tensor
    stats: Tensor
    turned: Tensor
    programs: int
    share_tiles: int

    @classmethod
    def of(
        cls, programs: int, rows: int, heads: int, group: int, pages: PageFormat, device: torch.device,
        share_tiles: int = SHARE_TILES,
    ) -> "Scratch":  # fmt: skip
        """For at most ``rows`` batch rows of ``heads`` KV heads."""
        places = 2 * programs + (rows * heads if pages.packed else 0)
        acc = torch.empty(places, group, pages.head_dim, dtype=torch.float32, device=device)
        stats = torch.empty(places, 2, group, dtype=torch.float32, device=device)
        turned = (rows if pages.kind == TURBO else 0, heads * group, pages.head_dim)
        return cls(acc, stats, torch.empty(turned, dtype=pages.dtype, device=device), programs, share_tiles)


def tile_tokens(page_tokens: int, head_dim: int) -> int:
    """Tokens a program reads at a time: a page, or several small ones."""
    return max(page_tokens, TILE_ELEMENTS // head_dim)


def packed_tile(pages: PageFormat) -> int:
    """The same where pages are packed: a page; of KIVI twice as many elements and of one page."""
    return pages.page_tokens if pages.kind == TURBO else min(pages.page_tokens, 2 * TILE_ELEMENTS // pages.head_dim)


def share_unit(pages: PageFormat) -> int:
    """A program's least share is counted in so many tokens, which take as long to read as a part takes to merge."""
    return 2 * TILE_ELEMENTS // pages.head_dim if pages.packed else tile_tokens(pages.page_tokens, pages.head_dim)


def warps(pages: PageFormat) -> int:
    """Of a program that walks pages."""
    return min(WARPS, max(1, pages.page_tokens // 64)) if pages.kind == TURBO else WARPS


def grid_programs(pages: PageFormat, processors: int) -> int:
    """How many programs share a layer's pages: as many as fit on the GPU at once, less ``RESERVED``.

    Measured on an H200: two fit on a processor when they read one page at a time, three when they gather several
    (docs/results/draft-attention.md), and twelve warps of TurboQuant's. A program that must wait
    for a place doubles the kernel's time, and the programs of ``vericache.store.triton_copy`` take places: with none
    left for them attention takes 1.6 times as long beside a copy, with 16 left about 1.1 times
    (docs/results/transfer.md).
    """
    if pages.kind == TURBO:
        fit = TURBO_WARPS // warps(pages)
    else:
        fit = 2 if pages.packed or tile_tokens(pages.page_tokens, pages.head_dim) == pages.page_tokens else 3
    return fit * processors - RESERVED


def segment_starts(tables: ArenaTables, row_slot: Tensor, tail_len: Tensor, out: Tensor | None = None) -> Tensor:
    """First page of every segment in each layer's row of pages: int32 ``[L, R * H + 1]``, the last column the total.

    ``row_slot`` and ``tail_len`` are int32 ``[R]``: the arena slot of each batch row (-1: none) and its tail tokens.
    ``out``: where to write it, at least as wide. Device work only, one call per step.
    """
    layers, heads = tables.counts.shape[1:]
    segments = len(row_slot) * heads
    if out is None:
        out = torch.empty(layers, segments + 1, dtype=torch.int32, device=row_slot.device)
    _starts[(layers,)](
        tables.counts, tables.folded, row_slot, tail_len, out, segments, tables.counts.stride(0), out.stride(0),
        page_size=tables.format.page_tokens, tail_size=tables.format.tail_page_tokens, packed=tables.format.packed,
        heads=heads, block=1024, num_warps=4,
    )  # fmt: skip
    return out


def attend_arena(
    query: Tensor,
    output: Tensor,
    tables: ArenaTables,
    layer: int,
    row_slot: Tensor,
    tail_len: Tensor,
    row_token: Tensor,
    starts: Tensor,
    scratch: Scratch,
    scale: float,
) -> None:
    """Softmax attention of every draft row over its slot's pages of one layer, written into ``output``.

    Args:
        query: ``[T, Hq, D]``, the batch's tokens, in the pool's dtype.
        output: ``[T, Hq, D]``; tokens of rows without a slot are not touched.
        row_token: int32 ``[R]`` or longer, each row's first token; a draft row has one.
        starts: this step's ``segment_starts``.
    """
    heads = tables.table.shape[2]
    pages, data = tables.format, tables.pool.data
    segments, group, dim = len(row_slot) * heads, query.shape[1] // heads, pages.head_dim
    table, counts = tables.table[:, layer], tables.counts[:, layer]
    first = starts[layer]
    tile = packed_tile(pages) if pages.packed else tile_tokens(pages.page_tokens, dim)
    sizes = {
        "least": max(1, scratch.share_tiles * share_unit(pages) // pages.page_tokens), "heads": heads, "group": group,
        "group_pad": max(8, triton.next_power_of_2(group)), "dim": dim, "kind": pages.kind,
    }  # fmt: skip
    scale_log2 = scale * 1.4426950408889634  # exp2 is the hardware's exponential
    if pages.kind == TURBO:
        turn_queries[(len(row_slot),)](
            query, scratch.turned, row_slot, row_token, tables.turn, *query.stride()[:2],
            heads_pad=max(16, triton.next_power_of_2(heads * group)), heads=heads * group, dim=dim, num_warps=4,
        )  # fmt: skip
    _walk[(scratch.programs,)](
        query, output, data, tables.pool.bytes, scratch.turned, table, tables.folded, counts, row_slot, tail_len,
        row_token, first, scratch.acc, scratch.stats, scale_log2, segments, *query.stride()[:2], *output.stride()[:2],
        *table.stride()[:2], counts.stride(0), *data.stride()[:3], pages.page_bytes, pages.step, bits=pages.bits,
        page_size=pages.page_tokens, tile=tile, segments_pad=triton.next_power_of_2(segments), **sizes,
        num_warps=warps(pages), num_stages=STAGES, maxnreg=TURBO_REGISTERS if pages.kind == TURBO else None,
    )  # fmt: skip
    if pages.packed:
        finish[(segments,)](
            query, output, data, table, tables.folded, counts, row_slot, tail_len, row_token, first, scratch.acc,
            scratch.stats, tables.back, scale_log2, segments, scratch.programs, *query.stride()[:2],
            *output.stride()[:2], *table.stride()[:2], counts.stride(0), *data.stride()[:3],
            page_size=pages.page_tokens, tail_size=pages.tail_page_tokens, tile=max(TAIL_TILE, pages.tail_page_tokens),
            **sizes, num_warps=4, num_stages=STAGES,
        )  # fmt: skip
    else:
        merge[(segments,)](
            output, row_token, first, scratch.acc, scratch.stats, segments, scratch.programs, *output.stride()[:2],
            **sizes, num_warps=2,
        )  # fmt: skip


@triton.jit
def _starts(  # type: ignore[no-untyped-def]
    counts, folded, row_slot, tail_len, starts, segments, c_slot, s_layer,
    page_size: tl.constexpr, tail_size: tl.constexpr, packed: tl.constexpr, heads: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One layer: running total of the segments' pages."""
    layer = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for begin in range(0, segments, block):
        index = begin + tl.arange(0, block)
        row, head, exists = index // heads, index % heads, index < segments
        slot = tl.load(row_slot + row, mask=exists, other=-1).to(tl.int64)
        drafts = exists & (slot >= 0)
        kept = tl.load(counts + slot * c_slot + layer * heads + head, mask=drafts, other=0)
        pages = (kept + page_size - 1) // page_size
        if packed:
            pages += tl.load(folded + slot, mask=drafts, other=0)
        else:
            pages += (tl.load(tail_len + row, mask=drafts, other=0) + tail_size - 1) // tail_size
        tl.store(starts + layer * s_layer + index, total + tl.cumsum(pages, 0) - pages, mask=exists)
        total += tl.sum(pages, 0)
    tl.store(starts + layer * s_layer + segments, total)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    query, output, pool, content, turned, table, folded, counts, row_slot, tail_len, row_token, starts, part_acc,
    part_stats, scale_log2, segments, q_row, q_head, o_row, o_head, t_slot, t_head, c_slot, p_page, p_kv, p_token,
    page_bytes, step, kind: tl.constexpr, bits: tl.constexpr, page_size: tl.constexpr, tile: tl.constexpr,
    segments_pad: tl.constexpr, least: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr,
    dim: tl.constexpr,
):  # fmt: skip
    """One program's share of the layer's pages."""
    program = tl.program_id(0)
    total = tl.load(starts + segments)
    share = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), least)
    share_lo = program * share
    share_hi = tl.minimum(share_lo + share, total)
    ids = tl.arange(0, segments_pad)
    firsts = tl.load(starts + ids, mask=ids < segments, other=2147483647)
    segment = tl.sum((firsts <= share_lo).to(tl.int32)) - 1  # of equal ones the last: the others are empty
    g, d = tl.arange(0, group_pad), tl.arange(0, dim)
    here = share_lo
    while here < share_hi:
        lo, hi = tl.load(starts + segment), tl.load(starts + segment + 1)
        stop = tl.minimum(hi, share_hi)
        if stop > here:
            row, head = segment // heads, segment % heads
            slot = tl.load(row_slot + row).to(tl.int64)
            kept = tl.load(counts + slot * c_slot + head)
            kept_pages = (kept + page_size - 1) // page_size
            at_token = tl.load(row_token + row).to(tl.int64)
            peak = tl.full([group_pad], float("-inf"), tl.float32)
            mass = tl.zeros([group_pad], tl.float32)
            acc = tl.zeros([group_pad, dim], tl.float32)
            pages = table + slot * t_slot + head * t_head
            first, last = here - lo, stop - lo
            if kind == 1:
                peak, mass, acc = turbo_tiles(
                    turned + (row * heads + head) * group * dim, content, pages, first, last, kept_pages, kept,
                    scale_log2, page_bytes, step, bits, page_size, group, group_pad, dim,
                )  # fmt: skip
            else:
                q_at = query + at_token * q_row + (head * group + g)[:, None] * q_head + d[None, :]
                q = tl.load(q_at, mask=(g < group)[:, None], other=0.0)
                if kind == 0:
                    peak, mass, acc = plain_tiles(
                        q, peak, mass, acc, pool, pages, first, last, kept_pages, kept, tl.load(tail_len + row),
                        scale_log2, p_page, p_kv, p_token, page_size, tile, 3, dim,
                    )  # fmt: skip
                else:
                    peak, mass, acc = kivi_tiles(
                        q, peak, mass, acc, content, pages, first, last, kept_pages, kept, scale_log2, page_bytes,
                        bits, page_size, tile, dim,
                    )  # fmt: skip
            whole = (here == lo) & (stop == hi)
            if whole & (kind == 0):
                o_at = output + at_token * o_row + (head * group + g)[:, None] * o_head + d[None, :]
                tl.store(o_at, (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])
            else:
                place = program.to(tl.int64) * 2 + (here != share_lo).to(tl.int64)
                place = tl.where(whole, tl.num_programs(0) * 2 + segment, place)
                a_at = part_acc + place * group * dim + g[:, None] * dim + d[None, :]
                tl.store(a_at, acc, mask=(g < group)[:, None])
                s_at = part_stats + place * 2 * group + g
                tl.store(s_at, peak, mask=g < group)
                tl.store(s_at + group, mass, mask=g < group)
            here = stop
        segment += 1
