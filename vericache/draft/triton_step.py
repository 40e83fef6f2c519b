"""What one batch means to the draft arena, worked out on the device, and the writes into tails.

Positions and row order are read where the runner keeps them, so a row may depend on a result that the host has not seen
yet, and a captured graph finds everything in buffers that do not move.
"""

import triton
import triton.language as tl
from torch import Tensor

from vericache.draft.tables import ArenaTables

DRAFT = 1  # row flags: the row reads its slot instead of vLLM's pages, which hold nothing of it
UNWRITTEN = 2  # the row's K/V must not be written to vLLM's pages
CERTIFIED = 4  # the row reads its slot, too, but not by draft attention
PAD_SLOT = -1  # vLLM's PAD_SLOT_ID


def resolve_rows(
    rows: Tensor,
    num_rows: int,
    query_start: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    row_slot: Tensor,
    tail_len: Tensor,
    stock_lens: Tensor,
    token_slot: Tensor,
    tail_index: Tensor,
) -> None:
    """Fill the step's buffers, and pad the slot mappings of tokens whose K/V must not reach vLLM's pages.

    Args:
        rows: int32 ``[3, R]``, arena slot (-1: none), base and flags of every batch row.
        query_start, positions, seq_lens: the batch as vLLM's V2 runner lays it out, ``R`` rows and padding.
        slot_mapping: int64 ``[T]``, changed in place.
        row_slot, tail_len, stock_lens: int32, ``R`` and padding: slot and tail tokens of draft rows (-1 and 0 for all
            others), sequence lengths with 0 at draft and certified rows.
        token_slot, tail_index: int32 ``[T]``: the slot and tail entry each token's K/V goes to, slot -1 for none.
    """
    _resolve[(len(row_slot),)](
        rows, query_start, positions, seq_lens, slot_mapping, row_slot, tail_len, stock_lens, token_slot, tail_index,
        num_rows, len(token_slot), rows.stride(0), draft=DRAFT, certified=CERTIFIED,
        pad=PAD_SLOT, block=128, num_warps=1,
    )  # fmt: skip


def write_tails(
    key: Tensor, value: Tensor, tables: ArenaTables, layer: int, token_slot: Tensor, tail_index: Tensor
) -> None:
    """Scatter one layer's ``key`` and ``value`` ``[T, H, D]`` into the tails; ``token_slot`` int32 ``[T]``."""
    heads, dim = key.shape[1:]
    table, counts = tables.table[:, layer], tables.counts[:, layer]
    _write[(len(token_slot), heads)](
        key, value, tables.pool.data, table, tables.folded, counts, token_slot, tail_index, *key.stride()[:2],
        *value.stride()[:2], *table.stride()[:2], counts.stride(0), *tables.pool.data.stride()[:3],
        page_size=tables.format.page_tokens, tail_size=tables.format.tail_page_tokens, dim=dim, num_warps=1,
    )  # fmt: skip


def rewind_rounds(
    requests: Tensor,
    drafted: Tensor,
    num_computed: Tensor,
    total_len: Tensor,
    last_sampled: Tensor,
    all_token_ids: Tensor,
    draft_tokens: Tensor,
    output_counts: Tensor,
) -> None:
    """Take back what a round's draft rows left in the V2 runner's request states, and make it the drafts to verify.

    Args:
        requests, drafted: int32, state index and draft count of every request that verifies in this step.
        num_computed, total_len: int32 ``[requests]``; last_sampled int64 ``[requests, 1]``.
        all_token_ids: int32 ``[requests, max_model_len]``.
        draft_tokens: int64 ``[requests, width]``.
        output_counts: int32 ``[requests, vocab]``, how often each token was sampled (penalties).
    """
    _rewind[(len(requests),)](
        requests, drafted, num_computed, total_len, last_sampled, all_token_ids, all_token_ids.stride(0),
        draft_tokens, draft_tokens.stride(0), output_counts, output_counts.stride(0), num_warps=1,
    )  # fmt: skip


def accept_rows(sampled: Tensor, inputs: Tensor, first_logit: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Fold the samples of expanded rows into batch rows: leading drafts that equal the samples, and one sample more.

    Args:
        sampled: int64 ``[N]``, the sample of every logits row; inputs int32 ``[N]``, its input token.
        first_logit: int32 ``[R + 1]``, first logits row of each batch row.
        tokens: int64 ``[R, width]``, filled as far as ``kept`` says.
        kept: int32 ``[R]``, 1 or 0 (a chunk of a prompt) on entry; how many samples each row keeps on return.
    """
    _accept[(len(kept),)](sampled, inputs, first_logit, tokens, tokens.stride(0), kept, num_warps=1)


@triton.jit
def _resolve(  # type: ignore[no-untyped-def]
    rows, query_start, positions, seq_lens, slot_mapping, row_slot, tail_len, stock_lens, token_slot, tail_index,
    num_rows, num_tokens, rows_stride, draft: tl.constexpr, certified: tl.constexpr,
    pad: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    exists = row < num_rows
    slot = tl.load(rows + row, mask=exists, other=-1)
    base = tl.load(rows + rows_stride + row, mask=exists, other=0)
    flags = tl.load(rows + 2 * rows_stride + row, mask=exists, other=0)
    first = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    is_draft = exists & ((flags & draft) != 0)
    position = tl.load(positions + first, mask=is_draft, other=0)
    length = tl.load(seq_lens + row)
    tl.store(row_slot + row, tl.where(is_draft, slot, -1))
    tl.store(tail_len + row, tl.where(is_draft, position.to(tl.int32) - base + 1, 0))
    tl.store(stock_lens + row, tl.where(exists & ((flags & (draft | certified)) != 0), 0, length))
    last = end
    if row == tl.num_programs(0) - 1:  # the padding behind the last row
        last = num_tokens
    for start in range(first, last, block):
        token = start + tl.arange(0, block)
        mine = token < last
        index = tl.load(positions + token, mask=mine, other=0).to(tl.int32) - base
        tl.store(token_slot + token, tl.where((index >= 0) & (token < end), slot, -1), mask=mine)
        tl.store(tail_index + token, index, mask=mine)
        if flags != 0:
            tl.store(slot_mapping + token, tl.full([block], pad, tl.int64), mask=token < end)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    key, value, pool, table, folded, counts, token_slot, tail_index, k_token, k_head, v_token, v_head, t_slot, t_head,
    c_slot, p_page, p_kv, p_token, page_size: tl.constexpr, tail_size: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(token_slot + token).to(tl.int64)
    if slot >= 0:
        index = tl.load(tail_index + token)
        kept = tl.load(counts + slot * c_slot + head)
        entry = (kept + page_size - 1) // page_size + tl.load(folded + slot) + index // tail_size
        page = tl.load(table + slot * t_slot + head * t_head + entry).to(tl.int64)
        d = tl.arange(0, dim)
        at = pool + page * p_page + (index % tail_size) * p_token + d
        tl.store(at, tl.load(key + token * k_token + head * k_head + d))
        tl.store(at + p_kv, tl.load(value + token * v_token + head * v_head + d))


@triton.jit
def _rewind(  # type: ignore[no-untyped-def]
    requests, drafted, num_computed, total_len, last_sampled, all_token_ids, ids_stride, draft_tokens, draft_stride,
    output_counts, counts_stride,
):  # fmt: skip
    at = tl.program_id(0)
    request, count = tl.load(requests + at).to(tl.int64), tl.load(drafted + at)
    total = tl.load(total_len + request) - count
    for i in range(count):
        token = tl.load(all_token_ids + request * ids_stride + total + i)
        tl.store(draft_tokens + request * draft_stride + i, token.to(tl.int64))
        seen = output_counts + request * counts_stride + token
        tl.store(seen, tl.load(seen) - 1)
    pending = tl.load(all_token_ids + request * ids_stride + total - 1)
    tl.store(last_sampled + request, pending.to(tl.int64))
    tl.store(total_len + request, total)
    tl.store(num_computed + request, tl.load(num_computed + request) - count)


@triton.jit
def _accept(sampled, inputs, first_logit, tokens, width, kept):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    first, end = tl.load(first_logit + row), tl.load(first_logit + row + 1)
    drafts = end - first - 1
    taken = tl.load(kept + row)
    going = taken > 0
    for i in range(drafts + 1):
        token = tl.load(sampled + first + i)
        tl.store(tokens + row * width + i, token, mask=going)
        draft = tl.load(inputs + first + i + 1, mask=i < drafts, other=-1)
        going = going & (i < drafts) & (draft.to(tl.int64) == token)
        taken += going.to(tl.int32)
    tl.store(kept + row, taken)
