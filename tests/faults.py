"""Faults that tests inject into a running engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.engine import LiveEngine
from vericache.store.transfer import Direction, KeptRows, Ticket


class BrokenError(Exception):
    """An error no code of ours knows."""


@contextmanager
def failing_copies(engine: LiveEngine, direction: Direction, fails: Callable[[int], bool]) -> Iterator[list[int]]:
    """The n-th copy in ``direction`` raises when ``fails(n)``. Yields a list with the number of copies so far."""
    copies, count = engine.worker.copies, [0]
    submit = copies.submit

    def broken_submit(
        way: Direction, blocks: Sequence[int], pages: Sequence[int], kept: KeptRows | None = None
    ) -> Ticket:
        if way is direction:
            count[0] += 1
            if fails(count[0]):
                raise BrokenError(f"copy {count[0]} {way.value}")
        return submit(way, blocks, pages, kept)

    copies.submit = broken_submit
    try:
        yield count
    finally:
        del copies.submit
