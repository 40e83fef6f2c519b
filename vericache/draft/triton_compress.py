"""Scoring a long context and moving what is kept of it, on vLLM's GPU pages where they lie.

Pages are those of vLLM's GPU backends, ``[blocks, H, block, 2 * D]``: a token's key and value side by side, tokens and
heads of a block in any order (strides are read). D and the arena's page size are powers of two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors import Asked

ROWS, TILE, CHUNK = 64, 64, 512  # queries and keys of one product; keys of one program of the first pass


def attention_received(query: Tensor, key: Tensor, cache: Tensor, blocks: Tensor, asked: Asked, scale: float) -> Tensor:
    """``compressors.CachedTokens.attention_received`` over the pages ``blocks`` (int64, on the device) of one layer.

    Two passes over the keys: the log-sum-exp of each query's logits, then the weights. The logits, ``[Hq, T, J]``, are
    never stored.
    """
    tokens, query_heads, dim = query.shape
    heads = cache.shape[1]
    group, span = query_heads // heads, asked.sinks + asked.tokens
    rows, keys = tokens * group, span + tokens  # row w * G + g of a KV head; keys 0 .. span - 1 are cached
    out = torch.empty(heads, asked.answers(tokens), dtype=torch.float32, device=query.device)
    if not out.shape[1]:
        return out
    chunks, row_blocks = triton.cdiv(keys, CHUNK), triton.cdiv(rows, ROWS)
    parts = torch.empty(heads, chunks, row_blocks * ROWS, dtype=torch.float32, device=query.device)
    sizes: dict[str, Any] = {"block": cache.shape[2], "dim": dim, "height": ROWS, "tile": TILE}
    common = (
        query, *query.stride()[:2], key, *key.stride()[:2], cache, blocks, *cache.stride()[:3], asked.sinks,
        asked.start, span, tokens, rows, group, scale,
    )  # fmt: skip
    _partial[(chunks, heads, row_blocks)](*common, parts, chunk=CHUNK, **sizes)
    _reduce[(triton.cdiv(out.shape[1], TILE), heads)](
        *common, parts.logsumexp(1), out, out.shape[1], padded=row_blocks * ROWS, largest=asked.reduce == "max", **sizes
    )
    return out


def fill_pages(
    pool: Tensor, pages: Tensor, positions: Tensor, caches: list[Tensor], pointers: Tensor, blocks: Tensor
) -> None:
    """Copy kept tokens from vLLM's pages to head pages, all layers at once.

    Args:
        pool: ``[P, 2, page_tokens, D]``.
        pages: int32 ``[4, N]`` on the device: a head page's id, its ``layer * H + head``, where its tokens begin in
            ``positions``, and how many there are.
        positions: int64, kept positions ordered by layer, head, position.
        pointers: ``store.triton_copy.layer_pointers(caches)``.
        blocks: int64 on the device, the sequence's blocks.
    """
    heads, block, width = caches[0].shape[1:]
    _fill[(pages.shape[1],)](
        pool, pages, pages.stride(0), positions, caches[0], pointers, blocks, *caches[0].stride()[:3],
        *pool.stride()[:3], heads=heads, block=block, dim=width // 2, page_size=pool.shape[2],
    )  # fmt: skip


def place_pages(
    pool: Tensor, pages: Tensor, positions: Tensor, caches: list[Tensor], pointers: Tensor, blocks: Tensor, first: int,
    whole: int, placed: Tensor,
) -> None:  # fmt: skip
    """The way back: copy tokens from head pages to vLLM's blocks, all layers at once.

    Args:
        pool, pages, pointers: as in ``fill_pages``.
        positions: int32, otherwise as there.
        blocks: int on the device, the sequence's from its block ``first`` on; nothing goes to the first ``whole``.
        placed: uint8 ``[blocks, layers, H * block]``, set to 1 for every token of a head that is copied, in the order
            in which they lie in a block.
    """
    heads, block, width = caches[0].shape[1:]
    _place[(pages.shape[1],)](
        pool, pages, pages.stride(0), positions, caches[0], pointers, blocks, first, whole, len(blocks), placed,
        len(caches), *caches[0].stride()[:3], *pool.stride()[:3], heads=heads, block=block, dim=width // 2,
        page_size=pool.shape[2],
    )  # fmt: skip


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    query, q_token, q_head, key, k_token, k_head, cache, blocks, s_block, s_head, s_token, sinks, start, span, tokens,
    rows, group, scale, head, row, index, block: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Of rows ``row`` of a KV head and keys ``index``: sinks, the tokens asked about, the row's own; -inf where a row
    does not see a key."""
    d = tl.arange(0, dim)
    asked = row < rows
    at = query + (row // group) * q_token + (head * group + row % group) * q_head
    queries = tl.load(at[:, None] + d[None, :], mask=asked[:, None], other=0.0)
    cached, own = index < span, index - span
    position = tl.where(index < sinks, index, start + index - sinks)
    page = tl.load(blocks + position // block, mask=cached, other=0)
    at = cache + page * s_block + head * s_head + (position % block) * s_token
    keys = tl.load(at[:, None] + d[None, :], mask=cached[:, None], other=0.0)
    exists = (own >= 0) & (own < tokens)
    at = key + own * k_token + head * k_head
    keys += tl.load(at[:, None] + d[None, :], mask=exists[:, None], other=0.0)  # of each key one of the two is 0
    # float32 caches (the interpreter's) need exact products; those of bfloat16 are exact anyway.
    found = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    seen = cached[None, :] | (exists[None, :] & (own[None, :] <= (row // group)[:, None]))
    return tl.where(seen & asked[:, None], found, float("-inf"))


@triton.jit
def _partial(  # type: ignore[no-untyped-def]
    query, q_token, q_head, key, k_token, k_head, cache, blocks, s_block, s_head, s_token, sinks, start, span, tokens,
    rows, group, scale, parts,
    chunk: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, height: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each row over one chunk of the keys."""
    at, head, row_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_block * height + tl.arange(0, height)
    top = tl.full([height], float("-inf"), tl.float32)
    total = tl.zeros([height], tl.float32)
    for first in range(0, chunk, tile):
        index = at * chunk + first + tl.arange(0, tile)
        logits = _logits(
            query, q_token, q_head, key, k_token, k_head, cache, blocks, s_block, s_head, s_token, sinks, start, span,
            tokens, rows, group, scale, head, row, index, block, dim,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = higher
    place = (head * tl.num_programs(0) + at) * (tl.num_programs(2) * height) + row
    tl.store(parts + place, tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-30)), float("-inf")))


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    query, q_token, q_head, key, k_token, k_head, cache, blocks, s_block, s_head, s_token, sinks, start, span, tokens,
    rows, group, scale, logs, out, answers, padded: tl.constexpr, largest: tl.constexpr, block: tl.constexpr,
    dim: tl.constexpr, height: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    found = tl.zeros([tile], tl.float32)
    for first in range(0, rows, height):
        row = first + tl.arange(0, height)
        logits = _logits(
            query, q_token, q_head, key, k_token, k_head, cache, blocks, s_block, s_head, s_token, sinks, start, span,
            tokens, rows, group, scale, head, row, sinks + token, block, dim,
        )  # fmt: skip
        log = tl.load(logs + head * padded + row, mask=row < rows, other=0.0)
        weights = tl.exp(logits - log[:, None])
        if largest:
            found = tl.maximum(found, tl.max(weights, 0))
        else:
            found += tl.sum(weights, 0) / rows
    tl.store(out + head * answers + token, found, mask=token < answers)


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    pool, pages, s_pages, positions, cache, pointers, blocks, s_block, s_head, s_token, p_page, p_kv, p_token,
    heads: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    page = tl.load(pages + index).to(tl.int64)
    place = tl.load(pages + s_pages + index)
    first, count = tl.load(pages + 2 * s_pages + index), tl.load(pages + 3 * s_pages + index)
    base = tl.load(pointers + place // heads).to(cache.dtype)
    i, d = tl.arange(0, page_size), tl.arange(0, dim)
    mine = i < count
    position = tl.load(positions + first + i, mask=mine, other=0)
    source = tl.load(blocks + position // block, mask=mine, other=0) * s_block
    source += (place % heads) * s_head + (position % block) * s_token
    at = base + source[:, None] + d[None, :]
    to = pool + page * p_page + i[:, None] * p_token + d[None, :]
    tl.store(to, tl.load(at, mask=mine[:, None]), mask=mine[:, None])
    tl.store(to + p_kv, tl.load(at + dim, mask=mine[:, None]), mask=mine[:, None])


@triton.jit(do_not_specialize=["start", "whole", "count_blocks"])  # they differ from reload to reload
def _place(  # type: ignore[no-untyped-def]
    pool, pages, s_pages, positions, cache, pointers, blocks, start, whole, count_blocks, placed, layers, s_block,
    s_head, s_token, p_page, p_kv, p_token,
    heads: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr,
):  # fmt: skip
    at_page = tl.program_id(0)
    page = tl.load(pages + at_page).to(tl.int64)
    place = tl.load(pages + s_pages + at_page)
    first, count = tl.load(pages + 2 * s_pages + at_page), tl.load(pages + 3 * s_pages + at_page)
    base = tl.load(pointers + place // heads).to(cache.dtype)
    i, d = tl.arange(0, page_size), tl.arange(0, dim)
    position = tl.load(positions + first + i, mask=i < count, other=0)
    index = position // block - start
    mine = (i < count) & (index >= whole) & (index < count_blocks)
    target = tl.load(blocks + index, mask=mine, other=0).to(tl.int64) * s_block
    within = (place % heads) * s_head + (position % block) * s_token
    source = pool + page * p_page + i[:, None] * p_token + d[None, :]
    to = base + (target + within)[:, None] + d[None, :]
    tl.store(to, tl.load(source, mask=mine[:, None]), mask=mine[:, None])
    tl.store(to + dim, tl.load(source + p_kv, mask=mine[:, None]), mask=mine[:, None])
    part = within // (2 * dim)
    slot = (index.to(tl.int64) * layers + place // heads) * (heads * block) + part
    tl.store(placed + slot, (part * 0 + 1).to(tl.uint8), mask=mine)
