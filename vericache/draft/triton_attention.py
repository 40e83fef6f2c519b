"""Draft attention over head pages as a Triton kernel, balanced over ragged heads and fit for CUDA graphs.

A *segment* is one (batch row, KV head): the head's kept pages, then the row's tail pages, in the arena's page table.
Heads of one layer differ 50-fold in length: a grid over segments would leave most of a GPU idle. Instead all pages of a
layer are laid end to end and cut into equal shares, one per program of a fixed grid (stream-K), none of them so small
that its result costs more to merge than to make. A program walks its share, writes segments that lie in it whole, and
leaves partial softmax sums of the others in a scratch buffer; a second kernel merges those by log-sum-exp. Grid and
buffers depend on capacities only and lengths are read on the device, so a captured graph replays whatever the rows
are. A row without a slot (-1) has no pages; its output is left alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vericache.draft.formats import PageFormat
from vericache.draft.tables import ArenaTables
from vericache.draft.triton_unpack import kivi_tiles, plain_tiles, turbo_tiles

RESERVED = 16  # places left free for copies
TILE_ELEMENTS = 8192  # of keys that a program holds at a time; pages that are smaller are read several at once
TAIL_TILE = 16  # tokens behind packed pages: few, and what is read at once takes memory that other programs need
WARPS, STAGES = 4, 3
SHARE_TILES = 4  # a program's least share


@dataclass(frozen=True)
class Scratch:
    """Partial results of the programs: ``acc`` float32 ``[programs, 2, G, D]``, ``stats`` float32
    ``[programs, 2, 2, G]`` (maximum and sum). One for all layers; also fixes the number of programs and their least
    share, in tiles."""

    acc: Tensor
    stats: Tensor
    share_tiles: int

    @classmethod
    def of(
        cls, programs: int, group: int, head_dim: int, device: torch.device, share_tiles: int = SHARE_TILES
    ) -> "Scratch":
        acc = torch.empty(programs, 2, group, head_dim, dtype=torch.float32, device=device)
        return cls(acc, torch.empty(programs, 2, 2, group, dtype=torch.float32, device=device), share_tiles)


def tile_tokens(page_tokens: int, head_dim: int) -> int:
    """Tokens a program reads at a time: a page, or several small ones."""
    return max(page_tokens, TILE_ELEMENTS // head_dim)


def packed_tile(pages: PageFormat) -> int:
    """The same where pages are packed: of one page, and twice as many."""
    return min(pages.page_tokens, 2 * TILE_ELEMENTS // pages.head_dim)


def grid_programs(page_tokens: int, head_dim: int, processors: int) -> int:
    """How many programs share a layer's pages: as many as fit on the GPU at once, less ``RESERVED``.

    Measured on an H200: two fit on a processor when they read one page at a time, three when they gather several
    (docs/results/draft-attention.md). A program that must wait for a place doubles the kernel's time, and the programs
    of ``vericache.store.triton_copy`` take places: with none left for them attention takes 1.6 times as long beside a
    copy, with 16 left about 1.1 times (docs/results/transfer.md).
    """
    fit = 2 if tile_tokens(page_tokens, head_dim) == page_tokens else 3
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
        page_size=tables.format.page_tokens, tail_size=tables.format.tail_page_tokens, heads=heads, block=1024,
        num_warps=4,
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
    _, query_heads, dim = query.shape
    heads = tables.table.shape[2]
    group = query_heads // heads
    pages, data = tables.format, tables.pool.data
    segments = len(row_slot) * heads
    table, counts = tables.table[:, layer], tables.counts[:, layer]
    first = starts[layer]
    tile = packed_tile(pages) if pages.packed else tile_tokens(pages.page_tokens, dim)
    sizes = {
        "least": max(1, scratch.share_tiles * tile // pages.page_tokens), "heads": heads, "group": group,
        "group_pad": max(16, triton.next_power_of_2(group)), "dim": dim,
    }  # fmt: skip
    _walk[(scratch.acc.shape[0],)](
        query, output, data, tables.pool.bytes, table, tables.folded, counts, row_slot, tail_len, row_token, first,
        scratch.acc, scratch.stats, tables.turn, tables.back,
        scale * 1.4426950408889634,  # exp2 is the hardware's exponential
        segments, *query.stride()[:2], *output.stride()[:2], *table.stride()[:2], counts.stride(0), *data.stride()[:3],
        pages.page_bytes, pages.step, kind=pages.kind, bits=pages.bits, page_size=pages.page_tokens, tile=tile,
        tail_size=pages.tail_page_tokens, tail_tile=max(TAIL_TILE, pages.tail_page_tokens),
        segments_pad=triton.next_power_of_2(segments), **sizes, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _merge[(segments,)](
        output, row_token, first, scratch.acc, scratch.stats, segments, scratch.acc.shape[0], *output.stride()[:2],
        **sizes, num_warps=2,
    )  # fmt: skip


@triton.jit
def _starts(  # type: ignore[no-untyped-def]
    counts, folded, row_slot, tail_len, starts, segments, c_slot, s_layer,
    page_size: tl.constexpr, tail_size: tl.constexpr, heads: tl.constexpr, block: tl.constexpr,
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
        tail = tl.load(tail_len + row, mask=drafts, other=0)
        packed = tl.load(folded + slot, mask=drafts, other=0)
        pages = (kept + page_size - 1) // page_size + packed + (tail + tail_size - 1) // tail_size
        tl.store(starts + layer * s_layer + index, total + tl.cumsum(pages, 0) - pages, mask=exists)
        total += tl.sum(pages, 0)
    tl.store(starts + layer * s_layer + segments, total)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    query, output, pool, content, table, folded, counts, row_slot, tail_len, row_token, starts, part_acc, part_stats,
    turn, back, scale_log2, segments, q_row, q_head, o_row, o_head, t_slot, t_head, c_slot, p_page, p_kv, p_token,
    page_bytes, step, kind: tl.constexpr, bits: tl.constexpr, page_size: tl.constexpr, tile: tl.constexpr,
    tail_size: tl.constexpr, tail_tile: tl.constexpr, segments_pad: tl.constexpr, least: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
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
            slot, tail = tl.load(row_slot + row).to(tl.int64), tl.load(tail_len + row)
            kept = tl.load(counts + slot * c_slot + head)
            kept_pages = (kept + page_size - 1) // page_size
            at_token = tl.load(row_token + row).to(tl.int64)
            q_at = query + at_token * q_row + (head * group + g)[:, None] * q_head + d[None, :]
            q = tl.load(q_at, mask=(g < group)[:, None], other=0.0)
            peak = tl.full([group_pad], float("-inf"), tl.float32)
            mass = tl.zeros([group_pad], tl.float32)
            acc = tl.zeros([group_pad, dim], tl.float32)
            pages = table + slot * t_slot + head * t_head
            first, last = here - lo, stop - lo
            if kind == 0:
                peak, mass, acc = plain_tiles(
                    q, peak, mass, acc, pool, pages, first, last, kept_pages, kept, tail, scale_log2, p_page, p_kv,
                    p_token, page_size, tile, 3, dim,
                )  # fmt: skip
            else:
                packed = kept_pages + tl.load(folded + slot)
                end = tl.minimum(last, packed)
                if first < end:
                    if kind == 1:
                        peak, mass, acc = turbo_tiles(
                            q, peak, mass, acc, content, pages, first, end, kept_pages, kept, scale_log2, turn, back,
                            page_bytes, step, bits, page_size, tile, dim,
                        )  # fmt: skip
                    else:
                        peak, mass, acc = kivi_tiles(
                            q, peak, mass, acc, content, pages, first, end, kept_pages, kept, scale_log2, page_bytes,
                            bits, page_size, tile, dim,
                        )  # fmt: skip
                peak, mass, acc = plain_tiles(
                    q, peak, mass, acc, pool, pages, tl.maximum(first, packed), last, packed, 0, tail, scale_log2,
                    p_page, p_kv, p_token, tail_size, tail_tile, 1, dim,
                )  # fmt: skip
            if (here == lo) & (stop == hi):
                o_at = output + at_token * o_row + (head * group + g)[:, None] * o_head + d[None, :]
                tl.store(o_at, (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])
            else:
                place = program.to(tl.int64) * 2 + (here != share_lo).to(tl.int64)
                a_at = part_acc + place * group * dim + g[:, None] * dim + d[None, :]
                tl.store(a_at, acc, mask=(g < group)[:, None])
                s_at = part_stats + place * 2 * group + g
                tl.store(s_at, peak, mask=g < group)
                tl.store(s_at + group, mass, mask=g < group)
            here = stop
        segment += 1


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    output, row_token, starts, part_acc, part_stats, segments, programs, o_row, o_head,
    least: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Segments that several programs share: theirs are consecutive, and each left one part."""
    segment = tl.program_id(0)
    total = tl.load(starts + segments)
    lo, hi = tl.load(starts + segment), tl.load(starts + segment + 1)
    if hi > lo:
        share = tl.maximum((total + programs - 1) // programs, least)
        first, last = lo // share, (hi - 1) // share
        if last > first:
            g, d = tl.arange(0, group_pad), tl.arange(0, dim)
            peak = tl.full([group_pad], float("-inf"), tl.float32)
            mass = tl.zeros([group_pad], tl.float32)
            acc = tl.zeros([group_pad, dim], tl.float32)
            for program in range(first, last + 1):
                at_its_start = (program > first) | (first * share == lo)
                place = (program * 2 + tl.where(at_its_start, 0, 1)).to(tl.int64)
                s_at = part_stats + place * 2 * group + g
                its_peak = tl.load(s_at, mask=g < group, other=0.0)
                its_mass = tl.load(s_at + group, mask=g < group, other=0.0)
                a_at = part_acc + place * group * dim + g[:, None] * dim + d[None, :]
                its_acc = tl.load(a_at, mask=(g < group)[:, None], other=0.0)
                top = tl.maximum(peak, its_peak)
                fade, gain = tl.exp2(peak - top), tl.exp2(its_peak - top)
                mass = mass * fade + its_mass * gain
                acc = acc * fade[:, None] + its_acc * gain[:, None]
                peak = top
            row, head = segment // heads, segment % heads
            o_at = output + tl.load(row_token + row).to(tl.int64) * o_row
            o_at += (head * group + g)[:, None] * o_head + d[None, :]
            tl.store(o_at, (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])
