"""Pools give all or nothing; the fence runs every release once, and not while a step may touch it."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vericache.engine.ledger import CountPool, Fence, IdPool, LedgerError


@given(st.integers(0, 12), st.data())
def test_ids_are_unique_and_taken_all_or_nothing(size: int, data: st.DataObject) -> None:
    pool, held = IdPool(size), set[int]()
    for _ in range(data.draw(st.integers(0, 20))):
        if held and data.draw(st.booleans()):
            back = data.draw(st.sets(st.sampled_from(sorted(held)), min_size=1))
            pool.release(back)
            held -= back
        else:
            count = data.draw(st.integers(0, size + 2))
            ids = pool.take(count)
            assert (ids is None) == (count > size - len(held))
            if ids is not None:
                assert len(set(ids)) == len(ids) == count
                assert not held & set(ids)
                assert set(ids) <= set(range(size))
                held |= set(ids)
        assert pool.free == size - len(held)


def test_a_pool_that_was_drained_and_refilled_gives_every_id_again() -> None:
    pool = IdPool(5)
    ids = pool.take(5)
    assert ids is not None
    assert pool.take(1) is None
    assert pool.take(0) == []
    pool.release(ids)
    assert sorted(pool.take(5) or []) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [3, 99, -1])
def test_an_id_that_is_not_held_cannot_be_released(wrong: int) -> None:
    pool = IdPool(5)
    pool.take(2)
    with pytest.raises(LedgerError, match=f"id {wrong} was released but is not held"):
        pool.release([wrong])
    assert pool.free == 3


def test_an_id_cannot_be_released_twice() -> None:
    pool = IdPool(5)
    ids = pool.take(2)
    assert ids is not None
    pool.release(ids)
    with pytest.raises(LedgerError, match="released twice"):
        pool.release(ids)
    taken = [pool.take(1), pool.take(2), pool.take(2), pool.take(1)]
    assert sorted(i for t in taken if t for i in t) == [0, 1, 2, 3, 4], "no id has two owners afterwards"


def test_an_id_named_twice_in_one_release_is_an_error() -> None:
    pool = IdPool(5)
    pool.take(3)
    with pytest.raises(LedgerError, match="id 1 "):
        pool.release([1, 1])


@given(st.integers(0, 50), st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=30))
def test_counts_are_taken_all_or_nothing(size: int, moves: list[tuple[bool, int]]) -> None:
    pool, used = CountPool(size), 0
    for taking, count in moves:
        if taking:
            assert pool.take(count) == (count <= size - used)
            used += count if count <= size - used else 0
        elif count <= used:
            pool.release(count)
            used -= count
        else:
            with pytest.raises(LedgerError, match=f"{count} units were released but only {used} are held"):
                pool.release(count)
        assert (pool.used, pool.free) == (used, size - used)


def test_a_negative_release_is_an_error() -> None:
    """It would take units that nobody checked for."""
    pool = CountPool(5)
    with pytest.raises(LedgerError):
        pool.release(-1)
    assert pool.used == 0


class FenceMachine(RuleBasedStateMachine):
    """Steps are scheduled ahead and end in order, releases arrive in between, some from within a release."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = Fence()
        self.waits_for: list[int] = []  # per release: the steps that had been scheduled when it was given up
        self.ran: list[int] = []

    def _release(self, number: int, nested: bool = False) -> None:
        assert self.fence.done >= self.waits_for[number], "a step in flight may still touch the resource"
        assert number not in self.ran, "released twice"
        self.ran.append(number)
        if nested:
            self.give_up(nested=False)

    @rule()
    def schedule(self) -> None:
        self.fence.step_scheduled()

    @precondition(lambda self: self.fence.done < self.fence.scheduled)
    @rule()
    def end(self) -> None:
        self.fence.step_done()

    @rule(nested=st.booleans())
    def give_up(self, nested: bool) -> None:
        number = len(self.waits_for)
        self.waits_for.append(self.fence.scheduled)
        self.fence.after_in_flight(partial(self._release, number, nested))

    @invariant()
    def nothing_waits_longer_than_it_must(self) -> None:
        due = [i for i, step in enumerate(self.waits_for) if step <= self.fence.done]
        assert sorted(self.ran) == due
        assert self.fence.pending == len(self.waits_for) - len(due)

    def teardown(self) -> None:
        while self.fence.done < self.fence.scheduled:
            self.fence.step_done()
        assert sorted(self.ran) == list(range(len(self.waits_for)))
        assert self.fence.pending == 0


TestFence = FenceMachine.TestCase


def test_a_release_with_nothing_in_flight_runs_at_once() -> None:
    fence, ran = Fence(), list[str]()
    fence.after_in_flight(lambda: ran.append("first"))
    fence.step_scheduled()
    fence.step_done()
    fence.after_in_flight(lambda: ran.append("second"))
    assert ran == ["first", "second"]


def test_a_release_waits_for_every_step_in_flight_and_for_no_later_one() -> None:
    fence, ran = Fence(), list[str]()
    fence.step_scheduled()
    fence.step_scheduled()
    fence.after_in_flight(lambda: ran.append("given up"))
    fence.step_scheduled()
    fence.step_done()
    assert (ran, fence.pending) == ([], 1)
    fence.step_done()
    assert (ran, fence.pending) == (["given up"], 0)


def test_pages_pass_through_the_fence_before_they_are_free_again() -> None:
    """The way the engine uses both: nobody else gets the ids while the step is in flight."""
    fence, pool = Fence(), IdPool(4)
    ids = pool.take(3)
    assert ids is not None
    fence.step_scheduled()
    fence.after_in_flight(lambda: pool.release(ids))
    assert pool.take(2) is None
    fence.step_done()
    assert pool.free == 4
