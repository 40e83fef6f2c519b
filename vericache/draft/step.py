"""What one batch means to the draft arena, worked out once per step before the forward pass.

A pure function of the batch (row order, query offsets, positions) and of the typed rows the scheduler sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vericache.certified.attention import Policy
from vericache.draft.arena import DraftArena, TailTokens, Work


@dataclass(frozen=True)
class ArenaRow:
    """A batch row that belongs to an arena slot."""

    slot: int
    base: int
    draft: bool  # reads the slot instead of vLLM's pages (a verify row only refreshes the tail)
    certified: Policy | None = None  # it reads the slot by certified attention


@dataclass(frozen=True)
class CertifiedToken:
    """Token ``token`` of a batch, at ``position``: it reads a slot's sample and the first ``tail`` tokens behind it."""

    token: int
    slot: int
    position: int
    tail: int
    policy: Policy


@dataclass(frozen=True)
class DraftStep:
    """A batch of ``num_rows`` rows: those that read a slot (``arena_rows``, int64 ``[R]``); the draft rows among them
    (their ``draft_tokens``, int64) and their attention ``work``; the ``certified`` ones; and the ``tail`` entries this
    batch writes."""

    num_rows: int
    arena_rows: Tensor
    draft_tokens: Tensor
    work: Work | None
    tail: TailTokens | None
    certified: tuple[CertifiedToken, ...] = ()


@dataclass
class _Lists:
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tail: list[tuple[int, int, int]] = field(default_factory=list)  # (token, slot, tail index)
    certified: list[CertifiedToken] = field(default_factory=list)


def build_step(
    arena: DraftArena, rows: Sequence[ArenaRow | None], query_start: Sequence[int], positions: Sequence[int]
) -> DraftStep:
    """Resolve a batch against the arena; tails grow as far as this batch writes.

    Args:
        rows: one entry per batch row, None for rows that have no slot.
        query_start: first token of each row, and the number of tokens (length ``len(rows) + 1``).
        positions: true position of every token.
    """
    lists = _Lists()
    for row, entry in enumerate(rows):
        if entry is None:
            continue
        lo, hi = query_start[row], query_start[row + 1]
        first, last = positions[lo] - entry.base, positions[hi - 1] - entry.base
        if first < 0 or (entry.draft and hi - lo != 1):
            raise ValueError(
                f"batch row {row} of arena slot {entry.slot} has {hi - lo} tokens from tail index {first}; expected a "
                f"tail index >= 0, and one token in a draft row. This is a bug in row scheduling; please report it."
            )
        arena.grow_tail(entry.slot, last + 1)
        lists.tail.extend((lo + i, entry.slot, first + i) for i in range(hi - lo))
        if entry.draft:
            lists.rows.append(row)
        if entry.certified is not None:
            lists.certified.append(CertifiedToken(lo, entry.slot, positions[lo], last + 1, entry.certified))
        elif entry.draft:
            lists.tokens.append(lo)
            lists.slots.append(entry.slot)
            lists.lengths.append(last + 1)
    return DraftStep(
        len(rows),
        torch.tensor(lists.rows, dtype=torch.int64),
        torch.tensor(lists.tokens, dtype=torch.int64),
        arena.work(lists.slots, lists.lengths) if lists.slots else None,
        arena.tail_tokens(*zip(*lists.tail, strict=True)) if lists.tail else None,
        tuple(lists.certified),
    )
