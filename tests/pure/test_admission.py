"""Admission against a brute-force oracle, and its edge cases."""

from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.admission import Demand, Limits, LockStep, Staggered, book, reload_span
from scheduler.rings import Rings

LINK, PAGES = 100, 40


def rings_of(link: list[int], pages: list[int], now: int = 0) -> Rings:
    rings = Rings(len(link))
    for _ in range(now):
        rings.advance()
    rings.link.cells[:], rings.pages.cells[:] = link, pages
    return rings


def reload_cells(rings: Rings, d: int, demand: Demand, limits: Limits) -> list[tuple[int, int]] | None:
    """(distance, link time) of the reload for a verify at distance ``d``, cell by cell, the last one first."""
    left, taken = demand.link_ns, []
    if left and rings.link.cells[d - 1] >= limits.link_ns:
        return None  # the reload would be over before: an earlier verify would do
    for i in range(d - 1, d - demand.span - 2, -1):
        if i < 0:
            return None
        amount = max(0, min(left, limits.link_ns - rings.link.cells[i]))
        taken.append((i, amount))
        left -= amount
        if left == 0:
            return taken
    return None


def has_room(rings: Rings, d: int, demand: Demand, limits: Limits) -> bool:
    """The reload and the pages of a verify at distance ``d`` keep both limits."""
    loads = reload_cells(rings, d, demand, limits)
    if loads is None:
        return False
    return all(rings.pages.cells[i] + demand.pages <= limits.pages for i in range(loads[-1][0], d + demand.hold + 1))


def oracle(rings: Rings, demand: Demand, limits: Limits) -> int | None:
    """The algorithm of the paper, read literally: anchor, anchor + 1, anchor - 1, ..."""
    first, last = demand.span, rings.window - 1 - demand.hold
    if first > last:
        return None
    anchor = min(max(demand.anchor, first), last)
    for step in range(rings.window):
        for d in (anchor + step, anchor - step):
            if first <= d <= last and has_room(rings, d, demand, limits):
                return d
    return None


@st.composite
def situations(draw: st.DrawFn) -> tuple[Rings, Demand, Limits]:
    """Rings that are partly full, so that the first fit is often neither the anchor nor absent."""
    window = draw(st.integers(2, 24))
    amount = st.one_of(st.just(0), st.integers(0, LINK), st.just(LINK))
    held = st.one_of(st.just(0), st.integers(0, PAGES), st.just(PAGES))
    link = draw(st.lists(amount, min_size=window, max_size=window))
    pages = draw(st.lists(held, min_size=window, max_size=window))
    demand = Demand(
        anchor=draw(st.integers(0, 30)),
        span=draw(st.integers(1, 6) | st.integers(1, 26)),
        link_ns=draw(st.integers(0, LINK + 5) | st.integers(0, 6 * LINK)),
        pages=draw(st.integers(0, PAGES + 5)),
        hold=draw(st.integers(0, 2)),
    )
    # Limits change from tick to tick: cells may exceed them, and a loan to plain rows may leave less than none.
    limits = Limits(draw(st.integers(1, LINK + 20)), draw(st.integers(-3, PAGES + 10)))
    return rings_of(link, pages, draw(st.integers(0, 50))), demand, limits


@given(situations())
@example((rings_of([0] * 4, [0] * 4), Demand(9, 3, 3, 1), Limits(1, 1)))
@example((rings_of([0, 9, 0, 0, 9, 0], [0] * 6), Demand(4, 2, 18, 0), Limits(9, 0)))
@example((rings_of([0, 9, 4, 0, 6, 0], [0] * 6), Demand(5, 2, 17, 0), Limits(9, 0)))
def test_staggered_equals_the_oracle(situation: tuple[Rings, Demand, Limits]) -> None:
    rings, demand, limits = situation
    assert Staggered().find(rings, demand, limits) == oracle(rings, demand, limits)


@given(situations())
def test_finding_reserves_nothing(situation: tuple[Rings, Demand, Limits]) -> None:
    rings, demand, limits = situation
    before = list(rings.link.cells), list(rings.pages.cells)
    Staggered().find(rings, demand, limits)
    LockStep(3).find(rings, demand, limits)
    assert (rings.link.cells, rings.pages.cells) == before


@given(situations())
def test_a_staggered_booking_never_exceeds_a_limit(situation: tuple[Rings, Demand, Limits]) -> None:
    rings, demand, limits = situation
    before = list(rings.link.cells), list(rings.pages.cells)
    booking = book(rings, Staggered(), demand, limits)
    if booking is None:
        assert (rings.link.cells, rings.pages.cells) == before
        return
    assert rings.now <= booking.load_at < booking.verify_at
    assert booking.verify_at - booking.load_at <= demand.span + 1
    assert booking.free_after == booking.verify_at + demand.hold < rings.now + rings.window
    assert sum(booking.link) == demand.link_ns
    assert booking.pages == demand.pages
    for i in range(rings.window):
        loading = booking.load_at <= rings.now + i < booking.verify_at
        holding = booking.load_at <= rings.now + i <= booking.free_after
        amount = booking.link[rings.now + i - booking.load_at] if loading else 0
        assert rings.link.cells[i] == before[0][i] + amount
        assert rings.pages.cells[i] == before[1][i] + holding * demand.pages
        assert not amount or rings.link.cells[i] <= limits.link_ns
        assert not holding or rings.pages.cells[i] <= limits.pages


@given(situations(), st.integers(0, 20), st.integers(0, 10), st.integers(0, 30))
def test_a_larger_demand_is_refused_where_a_smaller_one_is(
    situation: tuple[Rings, Demand, Limits], link_ns: int, pages: int, anchor: int
) -> None:
    """The planner skips the search for demands that cover a refused one."""
    rings, demand, limits = situation
    larger = Demand(anchor, demand.span, demand.link_ns + link_ns, demand.pages + pages, demand.hold)
    assert larger.covers(demand)
    if Staggered().find(rings, demand, limits) is None:
        assert Staggered().find(rings, larger, limits) is None


@pytest.mark.parametrize("smaller", [Demand(0, 2, 4, 5), Demand(0, 2, 5, 4)])
def test_a_demand_that_is_smaller_in_one_respect_does_not_cover(smaller: Demand) -> None:
    demand = Demand(0, 2, 5, 5)
    assert demand.covers(demand)
    assert demand.covers(smaller)
    assert not smaller.covers(demand)


def test_demands_over_other_iterations_do_not_cover_each_other() -> None:
    """A reload that may take more iterations can find room where a smaller one does not."""
    assert not Demand(0, 2, 5, 5).covers(Demand(0, 1, 4, 5))


@pytest.mark.parametrize(
    ("blocked", "expected"),
    [([], 5), ([5], 6), ([5, 6], 4), ([5, 6, 4], 7), ([5, 6, 4, 7], 3), ([3, 4, 5, 6, 7], 8), (range(2, 10), 1)],
)
def test_the_search_alternates_around_the_anchor_later_first(blocked: list[int], expected: int) -> None:
    link = [LINK if i + 1 in blocked else 0 for i in range(10)]
    assert Staggered().find(rings_of(link, [0] * 10), Demand(5, 1, 1, 0), Limits(LINK, PAGES)) == expected


@pytest.mark.parametrize("anchor", [2, 5, 9])
@pytest.mark.parametrize("free", range(2, 10))
def test_the_search_reaches_every_iteration_from_every_anchor(anchor: int, free: int) -> None:
    rings = rings_of([0 if i in (free - 2, free - 1) else LINK for i in range(10)], [0] * 10)
    assert Staggered().find(rings, Demand(anchor, 2, 2 * LINK, 0), Limits(LINK, PAGES)) == free


def test_one_request_in_empty_rings_verifies_at_its_anchor() -> None:
    rings = Rings(16)
    for _ in range(7):
        rings.advance()
    booking = book(rings, Staggered(), Demand(anchor=6, span=3, link_ns=250, pages=PAGES), Limits(LINK, PAGES))
    assert booking is not None
    assert (booking.load_at, booking.verify_at, booking.free_after) == (10, 13, 13)
    assert booking.link == (50, LINK, LINK)


@pytest.mark.parametrize("anchor", [0, 1, 3])
def test_a_draft_shorter_than_its_reload_verifies_when_the_reload_is_over(anchor: int) -> None:
    """x < S: the anchor moves to the first iteration that leaves time for the reload."""
    assert Staggered().find(Rings(16), Demand(anchor, 4, 4 * LINK, PAGES), Limits(LINK, PAGES)) == 4


@pytest.mark.parametrize("hold", [0, 1])
def test_an_anchor_behind_the_window_is_clamped(hold: int) -> None:
    assert Staggered().find(Rings(16), Demand(40, 1, 1, 1, hold), Limits(LINK, PAGES)) == 15 - hold


@pytest.mark.parametrize("hold", [0, 1])
def test_a_reload_longer_than_the_window_is_booked_as_the_whole_window(hold: int) -> None:
    """S > W: it will be late, but it is never refused."""
    window, iteration_ns = 8, 50_000_000
    span, link_ns = reload_span(10**12, 1e9, iteration_ns, window - hold)
    assert (span, link_ns) == (window - hold - 1, (window - hold - 1) * iteration_ns)
    rings = Rings(window)
    booking = book(rings, Staggered(), Demand(3, span, link_ns, 5, hold), Limits(iteration_ns, 5))
    assert booking is not None
    assert (booking.load_at, booking.verify_at, booking.free_after) == (0, window - 1 - hold, window - 1)
    assert book(rings, Staggered(), Demand(3, 1, 1, 0, hold), Limits(iteration_ns, 5)) is None, "the link is full"


def test_a_span_that_can_never_fit_is_refused() -> None:
    assert Staggered().find(Rings(8), Demand(3, 8, 1, 1), Limits(LINK, PAGES)) is None
    assert Staggered().find(Rings(8), Demand(3, 7, 1, 1, hold=1), Limits(LINK, PAGES)) is None


def test_nothing_to_reload_takes_one_iteration_and_no_link_time() -> None:
    """K = 0 bytes fits a link that is full, but still waits for pages."""
    assert reload_span(0, 1e9, 50_000_000, 64) == (1, 0)
    full = rings_of([LINK] * 8, [0] * 8)
    assert Staggered().find(full, Demand(4, 1, 0, 3), Limits(LINK, PAGES)) == 4
    assert Staggered().find(rings_of([0] * 8, [PAGES] * 8), Demand(4, 1, 0, 3), Limits(LINK, PAGES)) is None


def test_a_demand_that_fills_a_limit_exactly_fits() -> None:
    rings = rings_of([LINK - 10] * 8, [PAGES - 4] * 8)
    assert Staggered().find(rings, Demand(4, 2, 30, 4), Limits(LINK, PAGES)) == 4
    assert Staggered().find(rings, Demand(4, 2, 31, 4), Limits(LINK, PAGES)) is None
    assert Staggered().find(rings, Demand(4, 2, 30, 5), Limits(LINK, PAGES)) is None


def test_pages_are_checked_behind_the_verify_as_well() -> None:
    """With run-ahead the pages outlive the verify by ``hold`` iterations; the link does not."""
    rings = rings_of([0, 0, LINK, LINK, 0, 0], [0, 0, 0, PAGES, 0, 0])
    assert Staggered().find(rings, Demand(2, 2, 2 * LINK, 1, hold=0), Limits(LINK, PAGES)) == 2
    assert Staggered().find(rings, Demand(2, 2, 2 * LINK, 1, hold=1), Limits(LINK, PAGES)) is None
    assert Staggered().find(rings, Demand(2, 2, 2 * LINK, 0, hold=1), Limits(LINK, PAGES)) == 2


def test_reloads_follow_one_another_without_a_gap() -> None:
    """None takes a whole number of iterations: each begins in the iteration in which the one before ends."""
    rings, limits = Rings(32), Limits(LINK, PAGES)
    booked = [book(rings, Staggered(), Demand(31, 3, 250, 1), limits) for _ in range(12)]
    assert None not in booked
    assert rings.link.cells[1:31] == [LINK] * 30
    assert book(rings, Staggered(), Demand(31, 3, 250, 1), limits) is None


def test_a_reload_that_begins_in_a_shared_iteration_books_one_more() -> None:
    rings = rings_of([0, 0, 0, 0, 0, 40, 0, 0], [0] * 8)
    booking = book(rings, Staggered(), Demand(6, 3, 250, 1), Limits(LINK, PAGES))
    assert booking is not None
    assert (booking.load_at, booking.verify_at, booking.link) == (3, 6, (90, LINK, 60))
    booking = book(rings, Staggered(), Demand(3, 3, 300, 1), Limits(LINK, PAGES))
    assert booking is not None
    assert (booking.load_at, booking.verify_at) == (0, 3)


@given(
    num_bytes=st.integers(0, 10**13),
    rate=st.floats(1e6, 1e12),
    iteration_ns=st.integers(10**5, 10**9),
    window=st.integers(2, 1024),
)
@example(num_bytes=50_000_000, rate=1e9, iteration_ns=50_000_000, window=64)
@example(num_bytes=50_000_001, rate=1e9, iteration_ns=50_000_000, window=64)
def test_reload_span_covers_the_transfer_or_takes_the_whole_window(
    num_bytes: int, rate: float, iteration_ns: int, window: int
) -> None:
    span, link_ns = reload_span(num_bytes, rate, iteration_ns, window)
    total_ns = ceil(num_bytes / rate * 1e9)
    assert 1 <= span <= window - 1
    assert 0 <= link_ns <= span * iteration_ns
    if link_ns < total_ns:
        assert (span, link_ns) == (window - 1, span * iteration_ns), "only a clamped reload may be booked short"
    else:
        assert link_ns == total_ns
        assert (span - 1) * iteration_ns < total_ns or span == 1, "no iteration more than the reload needs"


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(2, 256))
def test_more_bytes_never_take_fewer_iterations(a: int, b: int, window: int) -> None:
    assert reload_span(min(a, b), 1e9, 10**7, window)[0] <= reload_span(max(a, b), 1e9, 10**7, window)[0]


@given(situations(), st.integers(2, 12))
def test_lock_step_takes_the_next_common_boundary_when_memory_allows(
    situation: tuple[Rings, Demand, Limits], period: int
) -> None:
    rings, demand, limits = situation
    boundaries = [d for d in range(demand.span, rings.window) if (rings.now + d) % period == 0]
    found = LockStep(period).find(rings, demand, limits)
    idle = rings_of([0] * rings.window, rings.pages.cells)
    wide = Limits(max(limits.link_ns, ceil(demand.link_ns / demand.span)), limits.pages)
    fits = bool(boundaries) and boundaries[0] + demand.hold < rings.window
    if fits and has_room(idle, boundaries[0], demand, wide):
        assert found == boundaries[0]
    else:
        assert found is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, LINK), st.integers(0, 12)), max_size=30), st.data())
def test_lock_step_bookings_share_boundaries_and_respect_memory(
    wanted: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    rings, policy = Rings(32), LockStep(9)
    for span, link_ns, pages in wanted:
        booking = book(rings, policy, Demand(4, span, link_ns, pages, hold=1), Limits(LINK, PAGES))
        assert booking is None or booking.verify_at % 9 == 0
        assert max(rings.pages.cells) <= PAGES
        if data.draw(st.booleans()):
            rings.advance()


def test_lock_step_may_over_subscribe_the_link() -> None:
    rings, policy = Rings(16), LockStep(8)
    booked = [book(rings, policy, Demand(3, 2, 2 * LINK, 1), Limits(LINK, PAGES)) for _ in range(5)]
    assert {b.verify_at for b in booked if b is not None} == {8}
    assert None not in booked
    assert rings.link.cells[6:8] == [5 * LINK] * 2


def test_lock_step_refuses_what_memory_does_not_hold() -> None:
    rings, policy = Rings(16), LockStep(8)
    booked = [book(rings, policy, Demand(3, 2, 1, 15), Limits(LINK, PAGES)) for _ in range(4)]
    assert [b is not None for b in booked] == [True, True, False, False]


def test_a_long_reload_in_lock_step_gets_a_later_boundary() -> None:
    rings = Rings(32)
    rings.advance()
    assert LockStep(8).find(rings, Demand(3, 7, 1, 1), Limits(LINK, PAGES)) == 7
    assert LockStep(8).find(rings, Demand(3, 8, 1, 1), Limits(LINK, PAGES)) == 15


@given(st.integers(4, 64), st.integers(0, 1), st.data())
def test_lock_step_admits_the_longest_reload_once_per_period(window: int, hold: int, data: st.DataObject) -> None:
    """A reload clamped to the window reaches a boundary only in some iterations, but it does reach one."""
    span, link_ns = reload_span(10**13, 1e9, 10**7, window - hold)
    period = data.draw(st.integers(2, window - 1))
    rings, admitted = Rings(window), 0
    for _ in range(period):
        rings.advance()
        admitted += LockStep(period).find(rings, Demand(3, span, link_ns, 1, hold), Limits(1, 1)) is not None
    assert admitted == 1


@pytest.mark.parametrize("period", [1, 0, -3])
def test_a_period_without_a_draft_is_refused(period: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 iterations .*got {period}"):
        LockStep(period)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 4), st.integers(1, 60), st.integers(0, 20)), min_size=1))
def test_cancelling_all_bookings_empties_the_rings(wanted: list[tuple[int, int, int, int]]) -> None:
    rings = Rings(16)
    booked = [book(rings, Staggered(), Demand(*w), Limits(LINK, PAGES)) for w in wanted]
    for booking in booked:
        if booking is not None:
            rings.cancel(booking)
    assert rings.link.cells == rings.pages.cells == [0] * 16
