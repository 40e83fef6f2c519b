"""Copy engines: pages between device KV caches and the host store.

The interface is that of a side stream: ``submit`` starts a copy and returns a ticket, ``wait`` orders what follows
on the compute stream after it. The CPU engine copies at once, so its tickets are complete when it returns them.
"""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vericache.errors import TransferError
from vericache.store.host import HostStore, page_bytes


class Direction(enum.Enum):
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True)
class Ticket:
    """One copy. ``seconds`` is its duration, known once it is complete."""

    direction: Direction
    num_bytes: int
    seconds: float


class CopyEngine(Protocol):
    """Moves page images. Block and page lists are parallel."""

    def submit(self, direction: Direction, blocks: Sequence[int], pages: Sequence[int]) -> Ticket:
        """Start a copy. Raises TransferError when it cannot be done; nothing may rely on the target then."""

    def wait(self, ticket: Ticket) -> None:
        """Order all later device work after the copy."""


class CpuCopyEngine:
    """Synchronous copies between tensors in host memory."""

    def __init__(self, caches: list[Tensor], store: HostStore) -> None:
        self._caches, self._store = caches, store
        self._page_bytes = page_bytes(caches)

    def submit(self, direction: Direction, blocks: Sequence[int], pages: Sequence[int]) -> Ticket:
        if len(blocks) != len(pages):
            raise TransferError(
                f"a copy {direction.value} names {len(blocks)} blocks and {len(pages)} host pages, expected as many"
            )
        start = time.perf_counter()
        block_ids, page_ids = torch.tensor(blocks, dtype=torch.int64), torch.tensor(pages, dtype=torch.int64)
        for layer, cache in enumerate(self._caches):
            if direction is Direction.TO_HOST:
                self._store.data[page_ids, layer] = cache[block_ids]
            else:
                cache[block_ids] = self._store.data[page_ids, layer]
        return Ticket(direction, len(blocks) * self._page_bytes, time.perf_counter() - start)

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for: the copy is complete when ``submit`` returns."""
