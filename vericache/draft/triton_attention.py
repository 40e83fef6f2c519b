"""Draft attention over head pages as a Triton kernel, balanced over ragged heads and fit for CUDA graphs.

A *segment* is one (batch row, KV head): the head's kept pages, then the row's tail pages, in the arena's page table.
Heads of one layer differ 50-fold in length: a grid over segments would leave most of a GPU idle. Instead all pages of a
layer are laid end to end and cut into equal shares, one per program of a fixed grid (stream-K). A program walks its
share, writes segments that lie in it whole, and leaves partial softmax sums of the others in a scratch buffer; a second
kernel merges those by log-sum-exp. Grid and buffers depend on capacities only and lengths are read on the device, so a
captured graph replays whatever the step's rows are. A row without a slot (-1) has no pages; its output is left alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

RESERVED = 16  # places left free for copies
TILE_ELEMENTS = 8192  # of keys that a program holds at a time; pages that are smaller are read several at once


@dataclass(frozen=True)
class ArenaTables:
    """The arena's device tables. ``pool [P, 2, PT, D]``; ``table`` int32 ``[slots, L, H, MAXP]``, kept pages of a head
    first, its tail pages behind them; ``counts`` int32 ``[slots, L, H]``, kept tokens."""

    pool: Tensor
    table: Tensor
    counts: Tensor

    @property
    def page_tokens(self) -> int:
        return self.pool.shape[2]


@dataclass(frozen=True)
class Scratch:
    """Partial results of the programs: ``acc`` float32 ``[programs, 2, G, D]``, ``stats`` float32
    ``[programs, 2, 2, G]`` (maximum and sum). One for all layers; also fixes the number of programs."""

    acc: Tensor
    stats: Tensor

    @classmethod
    def of(cls, programs: int, group: int, head_dim: int, device: torch.device) -> "Scratch":
        acc = torch.empty(programs, 2, group, head_dim, dtype=torch.float32, device=device)
        return cls(acc, torch.empty(programs, 2, 2, group, dtype=torch.float32, device=device))


def tile_tokens(page_tokens: int, head_dim: int) -> int:
    """Tokens a program reads at a time: a page, or several small ones."""
    return max(page_tokens, TILE_ELEMENTS // head_dim)


def grid_programs(page_tokens: int, head_dim: int, processors: int) -> int:
    """How many programs share a layer's pages: as many as fit on the GPU at once, less ``RESERVED``.

    Measured on an H200: two fit on a processor when they read one page at a time, three when they gather several
    (docs/results/draft-attention.md). A program that must wait for a place doubles the kernel's time, and the programs
    of ``vericache.store.triton_copy`` take places: with none left for them attention takes 1.6 times as long beside a
    copy, with 16 left about 1.1 times (docs/results/transfer.md).
    """
    fit = 2 if tile_tokens(page_tokens, head_dim) == page_tokens else 3
    return fit * processors - RESERVED


def segment_starts(tables: ArenaTables, row_slot: Tensor, tail_len: Tensor) -> Tensor:
    """First page of every segment in each layer's row of pages: int32 ``[L, R * H + 1]``, the last column the total.

    ``row_slot`` and ``tail_len`` are int32 ``[R]``: the arena slot of each batch row (-1: none) and its tail tokens.
    Device work only, one call per step.
    """
    pt = tables.page_tokens
    kept = tables.counts[row_slot.clamp(min=0).long()]  # [R, L, H]
    pages = (kept + (pt - 1)) // pt + ((tail_len + (pt - 1)) // pt)[:, None, None]
    pages = pages * (row_slot >= 0)[:, None, None]
    layers = kept.shape[1]
    ends = pages.transpose(0, 1).reshape(layers, -1).cumsum(1, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def attend_arena(
    query: Tensor,
    output: Tensor,
    tables: ArenaTables,
    layer: int,
    row_slot: Tensor,
    tail_len: Tensor,
    starts: Tensor,
    scratch: Scratch,
    scale: float,
) -> None:
    """Softmax attention of every draft row over its slot's pages of one layer, written into ``output``.

    Args:
        query: ``[R, Hq, D]``, one token per batch row, in the pool's dtype.
        output: ``[R, Hq, D]``; rows without a slot are not touched.
        starts: this step's ``segment_starts``.
    """
    rows, query_heads, dim = query.shape
    heads = tables.table.shape[2]
    group = query_heads // heads
    page_tokens = tables.page_tokens
    segments = rows * heads
    table, counts = tables.table[:, layer], tables.counts[:, layer]
    first = starts[layer]
    sizes = {
        "heads": heads, "group": group, "group_pad": max(16, triton.next_power_of_2(group)),
        "dim": dim,
    }  # fmt: skip
    _walk[(scratch.acc.shape[0],)](
        query, output, tables.pool, table, counts, row_slot, tail_len, first, scratch.acc, scratch.stats,
        scale * 1.4426950408889634,  # exp2 is the hardware's exponential
        segments, *query.stride()[:2], *output.stride()[:2], *table.stride()[:2], counts.stride(0),
        *tables.pool.stride()[:3],
        page_size=page_tokens, tile=tile_tokens(page_tokens, dim),
        segments_pad=triton.next_power_of_2(segments), **sizes, num_warps=4, num_stages=3,
    )  # fmt: skip
    _merge[(segments,)](
        output, first, scratch.acc, scratch.stats, segments, scratch.acc.shape[0], *output.stride()[:2], **sizes,
        num_warps=2,
    )  # fmt: skip


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    query, output, pool, table, counts, row_slot, tail_len, starts, part_acc, part_stats,
    scale_log2, segments, q_row, q_head, o_row, o_head, t_slot, t_head, c_slot, p_page, p_kv, p_token,
    page_size: tl.constexpr, tile: tl.constexpr, segments_pad: tl.constexpr, heads: tl.constexpr, group: tl.constexpr,
    group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """One program's share of the layer's pages."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    total = tl.load(starts + segments).to(tl.int64)
    share_lo, share_hi = program * total // programs, (program + 1) * total // programs
    ids = tl.arange(0, segments_pad)
    firsts = tl.load(starts + ids, mask=ids < segments, other=2147483647)
    segment = tl.sum((firsts <= share_lo).to(tl.int32)) - 1  # of equal ones the last: the others are empty
    g, d, token = tl.arange(0, group_pad), tl.arange(0, dim), tl.arange(0, tile)
    here = share_lo
    while here < share_hi:
        lo, hi = tl.load(starts + segment).to(tl.int64), tl.load(starts + segment + 1).to(tl.int64)
        stop = tl.minimum(hi, share_hi)
        if stop > here:
            row, head = segment // heads, segment % heads
            slot, tail = tl.load(row_slot + row).to(tl.int64), tl.load(tail_len + row)
            kept = tl.load(counts + slot * c_slot + head)
            kept_pages = (kept + page_size - 1) // page_size
            q_at = query + row * q_row + (head * group + g)[:, None] * q_head + d[None, :]
            q = tl.load(q_at, mask=(g < group)[:, None], other=0.0)
            peak = tl.full([group_pad], float("-inf"), tl.float32)
            mass = tl.zeros([group_pad], tl.float32)
            acc = tl.zeros([group_pad, dim], tl.float32)
            pages = table + slot * t_slot + head * t_head
            last = (stop - lo).to(tl.int32)
            for base in range((here - lo).to(tl.int32), last, tile // page_size):
                if tile == page_size:
                    index = base
                    page = tl.load(pages + index).to(tl.int64)
                    inside = token
                else:  # several small pages at once
                    index = base + token // page_size
                    page = tl.load(pages + index, mask=index < last, other=0).to(tl.int64)
                    inside = token % page_size
                left = tl.where(index < kept_pages, kept - index * page_size, tail - (index - kept_pages) * page_size)
                valid = (inside < left) & (index < last)
                at = pool + (page * p_page + inside * p_token)[:, None] + d[None, :]
                keys = tl.load(at, mask=valid[:, None], other=0.0)
                logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
                logits = tl.where(valid[None, :], logits, float("-inf"))
                top = tl.maximum(peak, tl.max(logits, 1))
                fade, weights = tl.exp2(peak - top), tl.exp2(logits - top[:, None])
                values = tl.load(at + p_kv, mask=valid[:, None], other=0.0)
                mass = mass * fade + tl.sum(weights, 1)
                acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
                peak = top
            if (here == lo) & (stop == hi):
                o_at = output + row * o_row + (head * group + g)[:, None] * o_head + d[None, :]
                tl.store(o_at, (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])
            else:
                place = program * 2 + (here != share_lo).to(tl.int64)
                a_at = part_acc + place * group * dim + g[:, None] * dim + d[None, :]
                tl.store(a_at, acc, mask=(g < group)[:, None])
                s_at = part_stats + place * 2 * group + g
                tl.store(s_at, peak, mask=g < group)
                tl.store(s_at + group, mass, mask=g < group)
            here = stop
        segment += 1


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    output, starts, part_acc, part_stats, segments, programs, o_row, o_head,
    heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Segments that several programs share: theirs are consecutive, and each left one part."""
    segment = tl.program_id(0)
    total = tl.load(starts + segments).to(tl.int64)
    lo, hi = tl.load(starts + segment).to(tl.int64), tl.load(starts + segment + 1).to(tl.int64)
    if hi > lo:
        # The program whose share holds page x is the largest p with p * total // programs <= x.
        first = ((lo + 1) * programs - 1) // total
        last = (hi * programs - 1) // total
        if last > first:
            g, d = tl.arange(0, group_pad), tl.arange(0, dim)
            peak = tl.full([group_pad], float("-inf"), tl.float32)
            mass = tl.zeros([group_pad], tl.float32)
            acc = tl.zeros([group_pad, dim], tl.float32)
            for program in range(first.to(tl.int32), last.to(tl.int32) + 1):
                at_its_start = (program > first) | (first * total // programs == lo)
                place = program * 2 + tl.where(at_its_start, 0, 1)
                # With more programs than pages some shares are empty, and those programs left nothing.
                holds_pages = program * total // programs < (program + 1) * total // programs
                exists = g < tl.where(holds_pages, group, 0)
                s_at = part_stats + place * 2 * group + g
                its_peak = tl.load(s_at, mask=exists, other=float("-inf"))
                its_mass = tl.load(s_at + group, mask=exists, other=0.0)
                a_at = part_acc + place * group * dim + g[:, None] * dim + d[None, :]
                its_acc = tl.load(a_at, mask=exists[:, None], other=0.0)
                top = tl.maximum(peak, its_peak)
                fade, gain = tl.exp2(peak - top), tl.exp2(its_peak - top)
                mass = mass * fade + its_mass * gain
                acc = acc * fade[:, None] + its_acc * gain[:, None]
                peak = top
            row, head = segment // heads, segment % heads
            o_at = output + row * o_row + (head * group + g)[:, None] * o_head + d[None, :]
            tl.store(o_at, (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])
