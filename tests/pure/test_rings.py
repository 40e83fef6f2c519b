"""Both rings hold integers, so that giving back what was reserved restores them exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.rings import Booking, Ring, RingError, Rings

WINDOW = 12
Cells = tuple[list[int], list[int]]


def cells(rings: Rings) -> Cells:
    return list(rings.link.cells), list(rings.pages.cells)


@st.composite
def bookings(draw: st.DrawFn, now: int = 0, window: int = WINDOW) -> Booking:
    """Any reservation that lies within the window as seen from ``now``."""
    load = draw(st.integers(0, window - 2))
    verify = draw(st.integers(load + 1, window - 1))
    free = draw(st.integers(verify, window - 1))
    amounts = st.integers(0, 10**12)
    link = draw(st.lists(amounts, min_size=verify - load, max_size=verify - load))
    return Booking(now + load, now + verify, now + free, tuple(link), draw(amounts))


def expected(live: list[Booking], now: int, window: int = WINDOW) -> Cells:
    """What the rings must hold, summed from the bookings alone."""
    link = [sum(b.link[i - b.load_at] for b in live if b.load_at <= i < b.verify_at) for i in range(now, now + window)]
    pages = [sum(b.pages for b in live if b.load_at <= i <= b.free_after) for i in range(now, now + window)]
    return link, pages


def test_a_new_ring_is_empty_and_starts_at_zero() -> None:
    ring = Ring(3)
    assert (ring.now, ring.window, ring.cells) == (0, 3, [0, 0, 0])


@pytest.mark.parametrize("window", [1, 0, -5])
def test_a_window_without_room_for_a_draft_and_a_verify_is_refused(window: int) -> None:
    with pytest.raises(RingError, match=f"at least 2 iterations, got {window}"):
        Ring(window)


def test_advance_forgets_the_past_and_opens_an_empty_iteration() -> None:
    ring = Ring(3)
    ring.add(0, [5, 5, 5])
    ring.add(1, [2])
    ring.advance()
    assert (ring.now, ring.cells) == (1, [7, 5, 0])


def test_peak_covers_both_ends() -> None:
    ring = Ring(5)
    ring.add(1, [4])
    ring.add(3, [9])
    assert [ring.peak(1, 3), ring.peak(1, 2), ring.peak(2, 3), ring.peak(2, 2), ring.peak(4, 4)] == [9, 4, 9, 0, 0]


def test_peak_is_addressed_by_iteration_number_not_by_cell() -> None:
    ring = Ring(4)
    ring.add(3, [6])
    for _ in range(3):
        ring.advance()
    assert ring.peak(3, 3) == 6
    assert ring.peak(4, 6) == 0


@given(st.data())
def test_reserving_then_cancelling_restores_the_rings_exactly(data: st.DataObject) -> None:
    rings = Rings(WINDOW)
    for booking in data.draw(st.lists(bookings(), max_size=6)):
        rings.book(booking)
    before = cells(rings)
    extra = [rings.book(b) for b in data.draw(st.lists(bookings(), min_size=1, max_size=6))]
    for booking in data.draw(st.permutations(extra)):
        rings.cancel(booking)
    assert cells(rings) == before


@given(st.data())
def test_cells_are_the_sum_of_the_live_bookings_at_any_time(data: st.DataObject) -> None:
    rings, live = Rings(WINDOW), []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["book", "cancel", "advance"]))
        if action == "book":
            live.append(rings.book(data.draw(bookings(rings.now))))
        elif action == "cancel" and live:
            rings.cancel(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            rings.advance()
        assert cells(rings) == expected(live, rings.now)


@pytest.mark.parametrize("age", range(WINDOW + 2))
def test_cancelling_skips_past_cells(age: int) -> None:
    """Whenever it is cancelled, what remains is what the other bookings promised."""
    rings = Rings(WINDOW)
    other = rings.book(Booking(1, 6, 8, (3,) * 5, 30))
    booking = rings.book(Booking(2, 5, 7, (10, 20, 30), 100))
    for _ in range(age):
        rings.advance()
    rings.cancel(booking)
    assert booking.released
    assert cells(rings) == expected([other], age)


def test_link_and_pages_of_one_booking_end_at_different_iterations() -> None:
    rings = Rings(6)
    rings.book(Booking(1, 3, 4, (5, 7), 3))
    assert cells(rings) == ([0, 5, 7, 0, 0, 0], [0, 3, 3, 3, 3, 0])


def test_pages_held_behind_the_verify_can_be_cancelled_after_it() -> None:
    """The link part is past then, the pages part is not."""
    rings = Rings(6)
    booking = rings.book(Booking(1, 3, 4, (5, 7), 3))
    for _ in range(3):
        rings.advance()
    assert cells(rings) == ([0] * 6, [3, 3, 0, 0, 0, 0])
    rings.cancel(booking)
    assert cells(rings) == ([0] * 6, [0] * 6)


@pytest.mark.parametrize("age", [0, 3, 9])
def test_cancelling_twice_is_an_error_and_changes_nothing(age: int) -> None:
    rings = Rings(WINDOW)
    rings.book(Booking(1, 6, 8, (3,) * 5, 30))
    booking = rings.book(Booking(2, 5, 7, (10, 20, 30), 100))
    rings.cancel(booking)
    for _ in range(age):
        rings.advance()
    before = cells(rings)
    with pytest.raises(RingError, match=r"iterations 2\.\.7 was released twice"):
        rings.cancel(booking)
    assert cells(rings) == before


@pytest.mark.parametrize("now", [0, 5])
def test_an_iteration_behind_the_window_is_an_error(now: int) -> None:
    ring = Ring(4)
    for _ in range(now):
        ring.advance()
    ring.add(now, [1] * 4)
    with pytest.raises(RingError, match=rf"iteration {now + 4} lies outside the window {now}\.\.{now + 3}"):
        ring.add(now + 1, [1] * 4)
    assert ring.cells == [1] * 4


@pytest.mark.parametrize(("verify", "free"), [(4, 4), (3, 4)], ids=["link and pages", "pages only"])
def test_a_booking_that_leaves_the_window_reserves_nothing(verify: int, free: int) -> None:
    """All or nothing: amounts without a booking that could be cancelled would stay for ever."""
    rings = Rings(4)
    with pytest.raises(RingError, match="outside the window"):
        rings.book(Booking(2, verify, free, (5,) * (verify - 2), 6))
    assert cells(rings) == ([0] * 4, [0] * 4)
