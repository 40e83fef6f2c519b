"""What happens around the walk over a layer's pages: queries turned before it, partial results merged after it."""

import triton
import triton.language as tl

from vericache.draft.triton_unpack import plain_tiles


@triton.jit
def turn_queries(  # type: ignore[no-untyped-def]
    query, turned, row_slot, row_token, turn, q_row, q_head,
    heads_pad: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """The queries of one draft row into the space of the codes; ``turn`` without its factor 1 / sqrt(D)."""
    row = tl.program_id(0)
    if tl.load(row_slot + row) >= 0:
        h, d = tl.arange(0, heads_pad)[:, None], tl.arange(0, dim)
        q_at = query + tl.load(row_token + row).to(tl.int64) * q_row + h * q_head + d[None, :]
        q = tl.load(q_at, mask=h < heads, other=0.0)
        q = tl.dot(q, tl.load(turn + d[:, None] * dim + d[None, :]), input_precision="ieee") / dim**0.5
        at = turned + row * heads * dim + h * dim + d[None, :]
        tl.store(at, q.to(turned.dtype.element_ty), mask=h < heads)


@triton.jit
def merge(  # type: ignore[no-untyped-def]
    output, row_token, starts, part_acc, part_stats, segments, programs, o_row, o_head, kind: tl.constexpr,
    least: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Segments of plain pages that several programs share."""
    segment = tl.program_id(0)
    total = tl.load(starts + segments)
    lo, hi = tl.load(starts + segment), tl.load(starts + segment + 1)
    share = tl.maximum((total + programs - 1) // programs, least)
    if (hi > lo) & ((hi - 1) // share > lo // share):
        _, mass, acc = _parts(part_acc, part_stats, lo, hi, share, segment, programs, group, group_pad, dim)
        g, d = tl.arange(0, group_pad), tl.arange(0, dim)
        row, head = segment // heads, segment % heads
        o_at = output + tl.load(row_token + row).to(tl.int64) * o_row + (head * group + g)[:, None] * o_head
        tl.store(o_at + d[None, :], (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    query, output, pool, table, folded, counts, row_slot, tail_len, row_token, starts, part_acc, part_stats, back,
    scale_log2, segments, programs, q_row, q_head, o_row, o_head, t_slot, t_head, c_slot, p_page, p_kv, p_token,
    page_size: tl.constexpr, tail_size: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr, least: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """One segment: what programs read of its packed pages, turned back, and its tail."""
    segment = tl.program_id(0)
    row, head = segment // heads, segment % heads
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot >= 0:
        total = tl.load(starts + segments)
        lo, hi = tl.load(starts + segment), tl.load(starts + segment + 1)
        share = tl.maximum((total + programs - 1) // programs, least)
        peak, mass, acc = _parts(part_acc, part_stats, lo, hi, share, segment, programs, group, group_pad, dim)
        g, d = tl.arange(0, group_pad), tl.arange(0, dim)
        if kind == 1:
            mean = (acc / tl.where(mass > 0, mass, 1.0)[:, None]).to(query.dtype.element_ty)
            acc = tl.dot(mean, tl.load(back + d[:, None] * dim + d[None, :]), input_precision="ieee")
            acc *= (mass / dim**0.5)[:, None]
        at_token = tl.load(row_token + row).to(tl.int64)
        q_at = query + at_token * q_row + (head * group + g)[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=(g < group)[:, None], other=0.0)
        packed, tail = hi - lo, tl.load(tail_len + row)
        peak, mass, acc = plain_tiles(
            q, peak, mass, acc, pool, table + slot * t_slot + head * t_head, packed,
            packed + (tail + tail_size - 1) // tail_size, packed, 0, tail, scale_log2, p_page, p_kv, p_token,
            tail_size, tile, 3, dim,
        )  # fmt: skip
        o_at = output + at_token * o_row + (head * group + g)[:, None] * o_head + d[None, :]
        tl.store(o_at, (acc / mass[:, None]).to(output.dtype.element_ty), mask=(g < group)[:, None])


@triton.jit
def _parts(  # type: ignore[no-untyped-def]
    part_acc, part_stats, lo, hi, share, segment, programs,
    group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and outputs of the segment ``lo .. hi - 1``. Programs that share it are consecutive, and each left
    one part; what one program read whole has a place of its own."""
    g, d = tl.arange(0, group_pad), tl.arange(0, dim)
    peak = tl.full([group_pad], float("-inf"), tl.float32)
    mass = tl.zeros([group_pad], tl.float32)
    acc = tl.zeros([group_pad, dim], tl.float32)
    if hi > lo:
        first, last = lo // share, (hi - 1) // share
        for program in tl.range(first, last + 1, num_stages=3):  # places are known ahead, so they are fetched ahead
            at_its_start = (program > first) | (first * share == lo)
            place = program * 2 + tl.where(at_its_start, 0, 1)
            place = tl.where(first == last, programs * 2 + segment, place).to(tl.int64)
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
    return peak, mass, acc
