"""Logits and sums of certified decode as Triton kernels: over a sketch, over an arena's pages, over the full cache in
pinned host memory.

A token of the full cache is read over the link when it is needed and at no other time: its key once, when it becomes
certain, and its value once, for the sum. Programs walk the context and skip what is not wanted, so the grid depends on
no data, and how much is read is bounded by ``Policy.max_fetch``, beyond which a head reads everything.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vericache.certified.sketch import GROUP, PerChannel
from vericache.certified.triton_decide import multipliers
from vericache.certified.workspace import Workspace
from vericache.draft.tables import ArenaTables

TILE = 32  # tokens that a program reads at a time
PROGRAMS = 32  # of each KV head; a few hundred reads under way fill a link


@dataclass(frozen=True)
class HostRows:
    """One layer of a context in host pages, as kernels read it. ``images [P, H, block, 2 D]``: page images of the
    layer, pinned where there is a GPU. ``pages`` int32 ``[blocks]``: the context's, on the device. ``order`` int32
    ``[2, block, D]``: where in a head's part of a page the numbers of a token's key and value lie; None: side by side,
    as the strides of ``images`` say."""

    images: Tensor
    pages: Tensor
    order: Tensor | None


@dataclass(frozen=True)
class HeldRows:
    """One layer of an arena slot. ``positions`` int32: of all kept tokens of the slot, by layer and head; ``first``
    int32 ``[H]``: where each head's begin. ``tail``: tokens behind the context that are seen."""

    tables: ArenaTables
    slot: int
    layer: int
    positions: Tensor
    first: Tensor
    tail: int

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Of kernels: pages, page table and counts of the heads, positions, tail."""
        pool, table = self.tables.pool.data, self.tables.table[self.slot, self.layer]
        counts = self.tables.counts[self.slot, self.layer]
        return (pool, *pool.stride()[:3], table, table.stride(0), counts, self.positions, self.first, self.tail)


def sketch_logits(query: Tensor, sketch: PerChannel, scale: float, work: Workspace) -> None:
    """``sketch.logits`` of ``query [H, G, D]`` into ``work.estimated`` and ``work.sigma`` (one for 32 tokens)."""
    heads, group, dim = query.shape
    groups = sketch.steps.shape[1]
    _sketch[(groups, heads)](
        query, sketch.codes, sketch.steps, sketch.zeros, work.estimated, work.sigma, scale, sketch.tokens, groups,
        *query.stride()[:2], work.columns, work.sigma.shape[-1], group=group, dim=dim, tile=GROUP, num_warps=4,
    )  # fmt: skip


def held_logits(query: Tensor, held: HeldRows, tokens: int, scale: float, work: Workspace) -> None:
    """Exact logits of what the slot holds into ``work.exact``: of a context of ``tokens`` tokens, and behind it."""
    heads, group, dim = query.shape
    _held[(work.mass.shape[1], heads)](
        query, *query.stride()[:2], *held.arguments, work.exact, work.columns, tokens, scale, group=group, dim=dim,
        page_size=held.tables.format.page_tokens, tile=TILE, num_warps=4,
    )  # fmt: skip


def complete(
    query: Tensor, host: HostRows, resident: Tensor, scale: float, work: Workspace, eps: Tensor, turn: int, last: bool
) -> None:
    """What the decisions of ``turn`` ask for becomes certain, and the keys of what is absent are read: all of it in the
    ``last`` turn. ``resident`` uint8 ``[H, n]``."""
    heads, group, dim = query.shape
    images, order = host.images, host.pages if host.order is None else host.order
    _complete[(work.mass.shape[1], heads)](
        query, *query.stride()[:2], images, *images.stride()[:3], host.pages, order, resident, resident.stride(0),
        work.certain, work.share, work.exact, work.error, work.cut, work.excessive, work.fallback, eps, turn, int(last),
        resident.shape[1], work.columns, scale, heads=heads, group=group, group_pad=triton.next_power_of_2(group),
        dim=dim, block=images.shape[2], side_by_side=host.order is None, tile=TILE, num_warps=4,
    )  # fmt: skip


def mix(held: HeldRows, host: HostRows, inclusion: Tensor, resident: Tensor, work: Workspace) -> Tensor:
    """The output, float32 ``[H, G, D]``: the sums of ``estimator.estimate`` over what the slot holds and over certain
    tokens that it does not hold, whose values are read from the host."""
    heads, programs, group, dim = work.mixed.shape
    images, order = host.images, host.pages if host.order is None else host.order
    _mix[(programs, heads)](
        *held.arguments, images, *images.stride()[:3], host.pages, order, inclusion, inclusion.stride(0), resident,
        resident.stride(0), work.certain, work.exact, work.upper, work.shift, work.bias, work.mixed, work.mass,
        inclusion.shape[1], work.columns, group=group, group_pad=max(16, triton.next_power_of_2(group)), dim=dim,
        page_size=held.tables.format.page_tokens, block=images.shape[2], side_by_side=host.order is None, tile=TILE,
        num_warps=4,
    )  # fmt: skip
    return work.mixed.sum(1) / work.mass.sum(1)[..., None]


@triton.jit
def _sketch(  # type: ignore[no-untyped-def]
    query, codes, steps, zeros, estimated, sigma, scale, tokens, groups, q_kv, q_head, width, sigma_width,
    group: tl.constexpr, dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """32 tokens, which share the range of a channel."""
    at, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, token = tl.arange(0, dim), at * tile + tl.arange(0, tile)
    row = (head * groups * tile + token) * (dim // 4)
    packed = tl.load(codes + row[:, None] + (d % (dim // 4))[None, :])
    code = (packed.to(tl.int32) >> (d // (dim // 4) * 2)[None, :]) & 3
    step = tl.load(steps + (head * groups + at) * dim + d).to(tl.float32)
    zero = tl.load(zeros + (head * groups + at) * dim + d).to(tl.float32)
    keys = code.to(tl.float32) * step[None, :] + zero[None, :]
    for g in range(group):
        q = tl.load(query + head * q_kv + g * q_head + d).to(tl.float32)
        logits = tl.sum(keys * q[None, :], 1) * scale
        tl.store(estimated + (head * group + g) * width + token, logits, mask=token < tokens)
        variance = tl.sum(q * q * step * step, 0) / 12
        tl.store(sigma + (head * group + g) * sigma_width + at, tl.sqrt(variance) * scale)


@triton.jit
def _held_tile(  # type: ignore[no-untyped-def]
    pool, p_page, p_token, table, positions, kept, tail, tokens, index, page_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Tile ``index`` of a head: its kept tokens, then those behind the context. Where keys lie, the columns,
    whether they exist, and whether they are kept ones."""
    kept_tiles = (kept + tile - 1) // tile
    behind = index >= kept_tiles
    j = tl.where(behind, index - kept_tiles, index) * tile + tl.arange(0, tile)
    exists = j < tl.where(behind, tail, kept)
    entry = j // page_size + tl.where(behind, (kept + page_size - 1) // page_size, 0)
    page = tl.load(table + entry, mask=exists, other=0).to(tl.int64)
    of_context = j < tl.where(behind, 0, kept)
    position = tl.load(positions + j, mask=of_context, other=0)
    return pool + page * p_page + (j % page_size) * p_token, tl.where(behind, tokens + j, position), exists, of_context


@triton.jit(do_not_specialize=["tail", "tokens"])
def _held(  # type: ignore[no-untyped-def]
    query, q_kv, q_head, pool, p_page, p_kv, p_token, table, t_head, counts, positions, first, tail, exact, width,
    tokens, scale, group: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, dim)
    kept, mine = tl.load(counts + head), positions + tl.load(first + head)
    tiles = (kept + tile - 1) // tile + (tail + tile - 1) // tile
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, column, exists, _ = _held_tile(
            pool, p_page, p_token, table + head * t_head, mine, kept, tail, tokens, index, page_size, tile
        )
        keys = tl.load(at[:, None] + d[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
        for g in range(group):
            q = tl.load(query + head * q_kv + g * q_head + d).to(tl.float32)
            logits = tl.sum(keys * q[None, :], 1) * scale
            tl.store(exact + (head * group + g) * width + column, logits, mask=exists)


@triton.jit
def _host_row(  # type: ignore[no-untyped-def]
    images, i_page, i_head, i_token, pages, order, head, position, wanted, value: tl.constexpr, block: tl.constexpr,
    dim: tl.constexpr, side_by_side: tl.constexpr,
):  # fmt: skip
    """Keys, or values, of ``wanted`` positions of a head ``[tile, D]``, float32, from the host."""
    d = tl.arange(0, dim)
    page = tl.load(pages + position // block, mask=wanted, other=0).to(tl.int64)
    at = images + page * i_page + head * i_head
    inside = position % block
    if side_by_side:
        place = (inside * i_token)[:, None] + value * dim + d[None, :]
    else:
        place = tl.load(order + value * block * dim + (inside * dim)[:, None] + d[None, :])
    return tl.load(at[:, None] + place, mask=wanted[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["turn", "last", "tokens"])
def _complete(  # type: ignore[no-untyped-def]
    query, q_kv, q_head, images, i_page, i_head, i_token, pages, order, resident, r_head, certain, share, exact, error,
    cut, excessive, fallback, eps, turn, last, tokens, width, scale, heads: tl.constexpr, group: tl.constexpr,
    group_pad: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, side_by_side: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    each, d = tl.arange(0, group_pad), tl.arange(0, dim)
    found = tl.load(error + (turn * heads + head) * group + each, mask=each < group, other=0.0)
    if tl.sum(((found <= tl.load(eps)) == 0).to(tl.int32), 0) > 0:
        too_many = tl.sum(tl.load(excessive + head * group + each, mask=each < group, other=0), 0)
        everything = too_many + last
        if (everything > 0) & (tl.program_id(0) == 0):
            tl.store(fallback + head, 1)
        for first in range(tl.program_id(0) * tile, tokens, tl.num_programs(0) * tile):
            at = first + tl.arange(0, tile)
            sampled = tl.load(certain + head * width + at, mask=at < tokens, other=1) == 0
            votes = tl.zeros([tile], tl.int32) + everything
            for g in range(group):
                bits = tl.load(share + (head * group + g) * width + at, mask=sampled, other=0.0)
                least = tl.load(cut + head * group + g)
                votes += (bits.to(tl.int32, bitcast=True) >= least).to(tl.int32)
            chosen = sampled & (votes > 0)
            absent = chosen & (tl.load(resident + head * r_head + at, mask=chosen, other=1) == 0)
            if tl.sum(absent.to(tl.int32), 0) > 0:
                keys = _host_row(
                    images, i_page, i_head, i_token, pages, order, head, at, absent, 0, block, dim, side_by_side
                )
                for g in range(group):
                    q = tl.load(query + head * q_kv + g * q_head + d).to(tl.float32)
                    logits = tl.sum(keys * q[None, :], 1) * scale
                    tl.store(exact + (head * group + g) * width + at, logits, mask=absent)
            tl.store(certain + head * width + at, chosen.to(tl.uint8), mask=chosen)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    exact, upper, shift, bias, head, column, r, sure, exists, width, group: tl.constexpr, group_pad: tl.constexpr,
):  # fmt: skip
    """``[group_pad, tile]``: with which weight tokens enter the sums, 0 where they do not exist."""
    g = tl.arange(0, group_pad)
    mine = (g < group)[:, None] & exists[None, :]
    at = (head * group + g)[:, None] * width + column[None, :]
    top = tl.load(shift + head * group + g, mask=g < group, other=0.0)
    weight = tl.exp(tl.load(exact + at, mask=mine, other=0.0) - top[:, None])
    guessed = mine & (sure == 0)[None, :]
    w = tl.load(upper + at, mask=guessed, other=0.0).to(tl.float64)
    slack = tl.load(bias + head * group + g, mask=g < group, other=0.0)
    spread = multipliers(w, r.to(tl.float64)[None, :], slack[:, None]) / r.to(tl.float64)[None, :]
    return tl.where(mine, weight * tl.where(guessed, spread, 1.0).to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["tail", "tokens"])
def _mix(  # type: ignore[no-untyped-def]
    pool, p_page, p_kv, p_token, table, t_head, counts, positions, first, tail, images, i_page, i_head, i_token, pages,
    order, inclusion, inclusion_head, resident, r_head, certain, exact, upper, shift, bias, mixed, mass, tokens, width,
    group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr, block: tl.constexpr,
    side_by_side: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    g, d = tl.arange(0, group_pad), tl.arange(0, dim)
    acc = tl.zeros([group_pad, dim], tl.float32)
    total = tl.zeros([group_pad], tl.float32)
    kept, mine = tl.load(counts + head), positions + tl.load(first + head)
    tiles = (kept + tile - 1) // tile + (tail + tile - 1) // tile
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, column, exists, of_context = _held_tile(
            pool, p_page, p_token, table + head * t_head, mine, kept, tail, tokens, index, page_size, tile
        )
        sure = tl.load(certain + head * width + column, mask=of_context, other=1)
        r = tl.load(inclusion + head * inclusion_head + column, mask=of_context, other=1.0)
        weights = _weights(exact, upper, shift, bias, head, column, r, sure, exists, width, group, group_pad)
        values = tl.load(at[:, None] + p_kv + d[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
        acc += tl.dot(weights, values, input_precision="ieee")
        total += tl.sum(weights, 1)
    for begin in range(tl.program_id(0) * tile, tokens, tl.num_programs(0) * tile):
        column = begin + tl.arange(0, tile)
        sure = tl.load(certain + head * width + column, mask=column < tokens, other=0)
        fetched = (sure != 0) & (tl.load(resident + head * r_head + column, mask=sure != 0, other=1) == 0)
        if tl.sum(fetched.to(tl.int32), 0) > 0:
            one = tl.full([tile], 1.0, tl.float32)
            weights = _weights(exact, upper, shift, bias, head, column, one, sure, fetched, width, group, group_pad)
            values = _host_row(
                images, i_page, i_head, i_token, pages, order, head, column, fetched, 1, block, dim, side_by_side
            )
            acc += tl.dot(weights, values, input_precision="ieee")
            total += tl.sum(weights, 1)
    place = (head * tl.num_programs(0) + tl.program_id(0)) * group + g
    tl.store(mixed + place[:, None] * dim + d[None, :], acc, mask=(g < group)[:, None])
    tl.store(mass + place, total, mask=g < group)
