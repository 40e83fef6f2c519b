"""Copy engines: pages between device KV caches and the host store.

The interface is that of side streams: ``submit`` starts a copy and returns a ticket, ``wait`` orders what follows on
the compute stream after it, and ``fence`` says that a new step begins. The CPU engine copies at once, so its tickets
are complete when it returns them.
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


class Ticket(Protocol):
    """One copy."""

    @property
    def num_bytes(self) -> int:
        """That were read at one end and written at the other: of all pages, without what was kept."""

    @property
    def seconds(self) -> float | None:
        """How long it took; None while it runs."""


class KeptRows(Protocol):
    """Tokens of a reload's blocks that the device holds elsewhere, bit by bit."""

    @property
    def num_bytes(self) -> int:
        """Of their keys and values, in all layers."""

    def place(self, blocks: Tensor) -> Tensor:
        """Copy them into ``blocks`` (int ids, on the device), in the current stream's order. Returns what is in place:
        uint8 ``[blocks, layers, parts]``, 1 for each of the equal parts of a block of one layer, as its bytes lie, that
        must not come from the host."""


class CopyEngine(Protocol):
    """Moves page images. Block and page lists are parallel."""

    def submit(
        self, direction: Direction, blocks: Sequence[int], pages: Sequence[int], kept: KeptRows | None = None
    ) -> Ticket:
        """Start a copy, after all device work so far. Raises TransferError when it cannot be done; nothing may rely on
        the target then. ``kept``: what a reload need not read from the host."""

    def wait(self, ticket: Ticket) -> None:
        """Order all later device work after the copy."""

    def fence(self) -> None:
        """A step begins: its device work and its copies may write to blocks that earlier steps' copies read."""

    def measure(self) -> Ticket | None:
        """Warm up and time a large reload, before any block holds anything; None where that says nothing."""


@dataclass(frozen=True)
class Copied:
    """A complete copy."""

    num_bytes: int
    seconds: float


class CpuCopyEngine:
    """Synchronous copies between tensors in host memory."""

    def __init__(self, caches: list[Tensor], store: HostStore) -> None:
        self._caches, self._store = caches, store
        self._page_bytes = page_bytes(caches)

    def submit(
        self, direction: Direction, blocks: Sequence[int], pages: Sequence[int], kept: KeptRows | None = None
    ) -> Copied:
        check_parallel(direction, blocks, pages)
        start = time.perf_counter()
        block_ids, page_ids = torch.tensor(blocks, dtype=torch.int64), torch.tensor(pages, dtype=torch.int64)
        placed = None if kept is None else kept.place(block_ids)
        for layer, cache in enumerate(self._caches):
            if direction is Direction.TO_HOST:
                self._store.data[page_ids, layer] = cache[block_ids]
            elif placed is None:
                cache[block_ids] = self._store.data[page_ids, layer]
            else:
                cache[block_ids] = _filled(cache[block_ids], self._store.data[page_ids, layer], placed[:, layer])
        return Copied(moved_bytes(len(blocks) * self._page_bytes, kept), time.perf_counter() - start)

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for: the copy is complete when ``submit`` returns."""

    def fence(self) -> None:
        """Nothing is under way."""

    def measure(self) -> None:
        """The first reload is as good a measurement."""


def _filled(device: Tensor, host: Tensor, placed: Tensor) -> Tensor:
    """``device [m, ...]`` with what is not ``placed [m, parts]`` from ``host``."""
    parts = (*placed.shape, -1)
    return torch.where(placed[..., None] != 0, device.reshape(parts), host.reshape(parts)).view(device.shape)


def moved_bytes(full: int, kept: KeptRows | None) -> int:
    """Of a copy of ``full`` bytes, those that cross the link."""
    return full - (0 if kept is None else kept.num_bytes)


def check_parallel(direction: Direction, blocks: Sequence[int], pages: Sequence[int]) -> None:
    """Raises TransferError when the lists differ in length."""
    if len(blocks) != len(pages):
        raise TransferError(
            f"a copy {direction.value} names {len(blocks)} blocks and {len(pages)} host pages, expected as many"
        )
