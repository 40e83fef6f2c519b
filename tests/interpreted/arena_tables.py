"""Random arenas as the Triton kernel sees them, and the answer in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.draft.formats import Plain
from vericache.draft.pool import PagePool
from vericache.draft.tables import ArenaTables


@dataclass(frozen=True)
class Rows:
    """A batch: its rows' slots (-1: no draft row) and tail lengths."""

    slot: Tensor
    tail: Tensor


def random_tables(
    counts: Tensor, tails: Tensor, page_tokens: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> ArenaTables:
    """``counts [slots, L, H]``; pages are shuffled over the pool, table entries nobody reads point outside it, and
    tokens nobody reads are NaN."""
    device = counts.device
    slots, layers, heads = counts.shape
    need = (counts + page_tokens - 1) // page_tokens + ((tails + page_tokens - 1) // page_tokens)[:, None, None]
    total, widest = int(need.sum()), int(need.max()) + 1
    order = torch.randperm(total, generator=generator, device=device).int()
    table = torch.full((slots, layers, heads, widest), 2**30, dtype=torch.int32, device=device)
    table[torch.arange(widest, device=device) < need[..., None]] = order
    form = Plain(page_tokens, dim, dtype)
    memory = PagePool.of(total, form, device)
    pool = memory.data.copy_(torch.randn(total, 2, page_tokens, dim, generator=generator, device=device))
    kept_pages = (counts + page_tokens - 1) // page_tokens
    for part, length in ((kept_pages - 1, counts), (need - 1, tails[:, None, None].expand_as(need))):
        used = (length - 1) % page_tokens + 1
        exists = (length > 0) & (part >= 0)
        page = table.gather(-1, part.clamp(min=0)[..., None].long())[..., 0][exists].long()
        unused = torch.arange(page_tokens, device=device) >= used[exists][:, None]
        pool.transpose(1, 2)[page] = torch.where(
            unused[..., None, None], float("nan"), pool.transpose(1, 2)[page].float()
        ).to(dtype)
    none = torch.empty(0, dtype=dtype, device=device)
    folded = torch.zeros(slots, dtype=torch.int32, device=device)
    return ArenaTables(form, memory, table, folded, counts.int(), none, none)


def expected(query: Tensor, tables: ArenaTables, layer: int, rows: Rows, scale: float) -> Tensor:
    """float32 ``[R, Hq, D]``; zeros for rows without a slot."""
    heads, pt, pool = tables.table.shape[2], tables.format.page_tokens, tables.pool.data
    group = query.shape[1] // heads
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for row, (slot, tail) in enumerate(zip(rows.slot.tolist(), rows.tail.tolist(), strict=True)):
        for head in range(heads) if slot >= 0 else ():
            kept = int(tables.counts[slot, layer, head])
            keys, values = [], []
            pages = tables.table[slot, layer, head].tolist()
            for length in (kept, tail):
                count = -(-length // pt)
                mine, pages = pages[:count], pages[count:]
                flat = pool[mine].float().transpose(0, 1).reshape(2, -1, pool.shape[-1])[:, :length]
                keys.append(flat[0])
                values.append(flat[1])
            k, v = torch.cat(keys), torch.cat(values)
            q = query[row, head * group : (head + 1) * group].float()
            out[row, head * group : (head + 1) * group] = torch.softmax(q @ k.T * scale, -1) @ v
    return out
