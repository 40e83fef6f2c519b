"""Copies between a GPU and pinned host memory, beside the model's work.

One side stream per direction. A copy starts after the device work submitted before it. What waits for it: a reload's
verify row (``wait``), and, for copies to the host, all work of later steps (``fence``), which may be given the blocks
that the copy reads. The host never waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.device import to_device
from vericache.store.host import HostStore, page_bytes
from vericache.store.transfer import Direction, KeptRows, Ticket, check_parallel, moved_bytes
from vericache.store.triton_copy import copy_pages, layer_pointers

_MEASURE_BYTES = 256 << 20  # 5 ms of a PCIe 5 link
SMALL_PIECE = 48 * 1024  # bytes of one block of one layer; shorter ones need more programs to fill the link


@dataclass(frozen=True)
class CudaTicket:
    """A copy on a side stream, between two events."""

    num_bytes: int
    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def seconds(self) -> float | None:
        return self.start.elapsed_time(self.end) / 1e3 if self.end.query() else None


class CudaCopyEngine:
    """``store`` is pinned."""

    def __init__(self, caches: list[Tensor], store: HostStore) -> None:
        self._caches, self._store, self._device = caches, store, caches[0].device
        self._pointers = layer_pointers(caches)
        self._page_bytes = page_bytes(caches)
        self._streams = {d: torch.cuda.Stream(self._device) for d in Direction}
        small = caches[0][0].nbytes < SMALL_PIECE
        # More programs to the host would double the time of attention beside them (docs/results/transfer.md).
        self._programs = {Direction.TO_HOST: 2, Direction.TO_DEVICE: 8 if small else 4}
        self._unfenced: torch.cuda.Event | None = None  # of the last copy to the host

    def submit(
        self, direction: Direction, blocks: Sequence[int], pages: Sequence[int], kept: KeptRows | None = None
    ) -> CudaTicket:
        check_parallel(direction, blocks, pages)
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            if blocks:  # a reload may have nothing left to copy
                ids = to_device(torch.tensor([list(blocks), list(pages)], dtype=torch.int32), self._device)
                placed = None if kept is None else kept.place(ids[0])  # on this stream, too
                to_host, programs = direction is Direction.TO_HOST, self._programs[direction]
                copy_pages(self._caches, self._pointers, self._store.data, ids[0], ids[1], to_host, programs, placed)
            end.record()
        if direction is Direction.TO_HOST:
            self._unfenced = end
        return CudaTicket(moved_bytes(len(blocks) * self._page_bytes, kept), start, end)

    def measure(self) -> CudaTicket:
        pages = range(min(self._caches[0].shape[0], len(self._store.data), max(1, _MEASURE_BYTES // self._page_bytes)))
        self.submit(Direction.TO_HOST, pages, pages)  # compiles the kernel
        self.submit(Direction.TO_DEVICE, pages, pages)
        return self.submit(Direction.TO_DEVICE, pages, pages)

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, CudaTicket)
        torch.cuda.current_stream(self._device).wait_event(ticket.end)

    def fence(self) -> None:
        if self._unfenced is not None:
            torch.cuda.current_stream(self._device).wait_event(self._unfenced)
            self._streams[Direction.TO_DEVICE].wait_event(self._unfenced)
            self._unfenced = None
