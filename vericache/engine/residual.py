"""Reloads that leave in the draft arena what it holds already (``residual_reload``).

Plain arena pages hold the keys and values of kept tokens bit by bit as they were in the blocks that went to the host,
so a reload may take them from there and fetch only the rest. Not in blocks whose host page may hold what another
request's prefill computed (``HostPages.mixed``): these are fetched whole, as is all behind the compressed context.
"""

from collections.abc import Iterable

from vericache.engine.blocks import ids
from vericache.engine.detached import Detached
from vericache.engine.ops import Load
from vericache.engine.reservations import Reservations


class Residual:
    """``crossing``: the share of a reload that comes from the host, of all who draft, and as it is to be expected where
    nobody does."""

    def __init__(self, reserved: Reservations, ratio: float) -> None:
        """``ratio`` of a context is kept; 0 where reloads leave nothing out."""
        self._reserved = reserved
        self.on = ratio > 0
        self._expected = self.crossing = 1 - ratio

    def review(self, records: Iterable[Detached]) -> None:
        """Once per step."""
        if not self.on:
            return
        found = [r for r in records if r.kept_bytes]
        full = sum(self.full(r) for r in found)
        self.crossing = 1 - sum(map(self.saved, found)) / full if full else self._expected

    def full(self, record: Detached) -> int:
        """Bytes of the blocks of a reload."""
        return self._reserved.plan.blocks_for(record.context) * self._reserved.plan.block_bytes

    def saved(self, record: Detached) -> int:
        """Bytes that a reload of the record leaves out, of all layers. Where some leading blocks are fetched whole, the
        kept tokens are taken to be spread evenly: only the worker knows where they are."""
        if not record.kept_bytes:
            return 0
        whole = self._reserved.host.mixed(record.host_pages) * self._reserved.plan.block_tokens
        return int(record.kept_bytes * max(0.0, 1 - whole / record.filled_at))

    def load(self, record: Detached) -> Load:
        """The reload of a round whose blocks are taken. Also where nothing is left to copy: the verify row waits for
        this, which comes after what others load."""
        rest = slice(record.here, self._reserved.plan.blocks_for(record.context))
        pages, blocks = tuple(record.host_pages[rest]), tuple(ids(record.blocks)[rest])
        if not record.kept_bytes:
            return Load(record.request_id, pages, blocks)
        whole = self._reserved.host.mixed(record.host_pages) - record.here
        return Load(record.request_id, pages, blocks, record.slot, record.here, max(0, whole))
