"""Ownership of numbered resources: free lists, counted budgets, and the fence that delays their reuse.

The scheduler process owns block ids, arena slots and host page ids; the worker only ever sees them in
operations. Under run-ahead scheduling a step that is still in flight may touch what has just been given up,
so everything passes through ``Fence`` on its way back.
"""

from collections import deque
from collections.abc import Callable, Iterable


class LedgerError(RuntimeError):
    """Something was released that is not held, or more was taken than there is."""


class IdPool:
    """The ids ``0 .. size - 1``, taken all-or-nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` ids, or None when fewer are free."""
        if count > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(count)]
        self._held.update(ids)
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Give ids back; LedgerError and nothing released when one of them is not held."""
        released = list(ids)
        once = set(released)
        if len(once) < len(released) or not once <= self._held:
            wrong = next(i for i in released if i not in self._held or released.count(i) > 1)
            raise LedgerError(f"id {wrong} was released but is not held (released twice, or never taken)")
        self._held -= once
        self._free.extend(released)


class CountPool:
    """A budget of interchangeable units."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    @property
    def free(self) -> int:
        return self.size - self.used

    def take(self, count: int) -> bool:
        """Take ``count`` units; False and nothing taken when fewer are free."""
        if count < 0:
            raise LedgerError(f"{count} units were taken, expected none or more")
        if count > self.free:
            return False
        self.used += count
        return True

    def release(self, count: int) -> None:
        if not 0 <= count <= self.used:
            raise LedgerError(f"{count} units were released but only {self.used} are held")
        self.used -= count


class Fence:
    """Runs releases once no scheduled step can touch the resource any more.

    Steps are numbered as they are scheduled; their results come back in the same order.
    """

    def __init__(self) -> None:
        self.scheduled = 0
        self.done = 0
        self._pending: deque[tuple[int, Callable[[], None]]] = deque()

    def step_scheduled(self) -> None:
        self.scheduled += 1

    def step_done(self) -> None:
        self.done += 1
        while self._pending and self._pending[0][0] <= self.done:
            self._pending.popleft()[1]()

    def after_in_flight(self, release: Callable[[], None]) -> None:
        """Call ``release`` when every step scheduled so far is done: at once if none is in flight."""
        if self.done == self.scheduled:
            release()
        else:
            self._pending.append((self.scheduled, release))

    @property
    def pending(self) -> int:
        return len(self._pending)
