"""Who is demoted and who comes back: never a loss, never half a measure, never to and fro."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.residency import ROUNDS, Candidate, Mix, Pace, Residency, working_pages

PACE = Pace(fixed=0.02, page=1e-6, reload=5e-6)
POLICY = Residency(dwell=64)
ROW = Candidate("r", pages=1000, gain=0.7, left=400, since=0, drafts=25, kept=250)
NOW = 1000


def rows(count: int, **changes: object) -> list[Candidate]:
    return [replace(ROW, request_id=f"r{i}", **changes) for i in range(count)]  # type: ignore[arg-type]


def none_working(count: int, largest: int) -> int:
    return 0


def one_round(count: int, largest: int) -> int:
    return largest


def victims(found: list[Candidate], short: int, working=one_round, pace: Pace = PACE, **options: object) -> list[str]:  # type: ignore[no-untyped-def]
    mix = Mix(plain=len(found), pages=sum(r.pages for r in found))
    options = {"joining": [1000], **options}
    return [c.request_id for c in POLICY.victims(found, short, working, NOW, mix, pace, **options)]  # type: ignore[arg-type]


def test_two_make_room_for_one_and_a_round() -> None:
    """The first demotion frees what its own verifies need: only two of them make room."""
    assert len(victims(rows(10), 1000)) == 2
    assert len(victims(rows(10), 1000, none_working)) == 1


def test_the_longest_goes_first_weighed_with_what_it_still_yields() -> None:
    found = rows(6)
    found[3] = replace(found[3], pages=3000)
    found[4] = replace(found[4], pages=3500, gain=0.1)  # its drafts are wrong: it yields far more as a plain row
    assert victims(found, 1000, none_working) == ["r3"]


def test_nobody_about_to_finish_and_nobody_who_just_came_back() -> None:
    assert victims(rows(10, left=50), 1000) == []
    assert victims(rows(10, since=NOW - 10), 1000) == []
    assert len(victims(rows(10, since=NOW - 64), 1000)) == 2


def test_no_half_measures() -> None:
    assert victims(rows(3), 5000) == []


def test_a_slow_link_demotes_nobody() -> None:
    assert victims(rows(10), 1000, pace=replace(PACE, reload=1.0)) == []


def test_poor_drafts_demote_nobody() -> None:
    assert victims(rows(10, gain=0.1), 1000) == []


def test_instead_of_a_preemption_one_may_go_alone() -> None:
    assert len(victims(rows(10), 500, none_working, joining=[], lost=(1, 1000))) == 1


def test_the_first_demotions_are_judged_by_those_that_follow() -> None:
    """Three make room for one and a round, which gains less than it costs; more of them let as many begin."""
    found, large = rows(12, gain=0.6), [1600] * 8
    assert victims(found, 1600, joining=large[:1]) == []
    assert len(victims(found, 1600, joining=large)) == 3
    assert victims(found, 1600, joining=large, most=3) == [], "the arena holds no more"


candidates = st.builds(
    Candidate,
    request_id=st.uuids().map(str),
    pages=st.integers(1, 4000),
    gain=st.floats(0.04, 1),
    left=st.integers(1, 1000),
    since=st.integers(0, NOW),
    drafts=st.integers(1, 62),
    kept=st.floats(1, 1000),
)
paces = st.builds(Pace, st.floats(1e-3, 0.1), st.floats(0, 1e-4), st.floats(1e-8, 1e-2))


@given(st.lists(candidates, max_size=20), st.integers(1, 8000), paces, st.integers(0, 4000))
def test_a_demotion_makes_room_and_tokens(found: list[Candidate], short: int, pace: Pace, working: int) -> None:
    mix = Mix(plain=len(found), pages=sum(r.pages for r in found))
    chosen = POLICY.victims(found, short, lambda n, _: working, NOW, mix, pace, joining=[short])
    if not chosen:
        return
    pages = sum(c.pages for c in chosen)
    assert pages >= short + working
    assert all(c.left > 2 * (c.drafts + 1) and NOW - c.since >= POLICY.dwell for c in chosen)
    after = mix.rows(1 - len(chosen), short - pages).drafting(chosen)
    assert after.rate(pace) > mix.rate(pace)


@given(st.lists(candidates, max_size=20), st.integers(-100, 20000), st.integers(0, 3000))
def test_who_comes_back_fits_beside_the_rounds_of_the_rest(found: list[Candidate], room: int, each: int) -> None:
    def working(change: int, _: int) -> int:
        return each * (len(found) + change)

    back = POLICY.returning(found, room, working, NOW)
    assert sum(c.pages for c in back) <= room - working(-len(back), 0) or not back
    gains = [c.gain for c in back]
    assert gains == sorted(gains), "those whose drafts yield least come first"


@given(st.lists(candidates, min_size=1, max_size=12), paces)
def test_the_link_never_takes_from_plain_rows(found: list[Candidate], pace: Pace) -> None:
    """However slow the link is, plain rows go on, a little slower by what the drafting ones read."""
    alone = Mix(plain=5, pages=5000)
    both = alone.drafting(found)
    slow = replace(pace, reload=1e6)
    assert both.rate(slow) >= 0.99 * alone.rate(slow)
    assert both.drafting(found, -1).rate(pace) == pytest.approx(alone.rate(pace))


def test_drafts_that_keep_the_link_from_better_ones_do_not_pay() -> None:
    good, bad = rows(6, gain=0.8), replace(ROW, request_id="bad", gain=0.05)
    tight = replace(PACE, reload=2.5e-4)
    crowded = Mix(plain=2, pages=2000).drafting([*good, bad])
    assert not POLICY.pays(bad, crowded, tight)
    assert POLICY.pays(good[0], crowded, tight)
    assert POLICY.pays(bad, crowded, replace(PACE, page=0.0)), "a link with time to spare costs nobody anything"


def test_rounds_hold_pages_as_the_link_lets_them() -> None:
    assert working_pages(100, 1, 24, (2, 10, 0), 5) == 100
    assert working_pages(100, 50, 24, (2, 1, 0), 100) == 1500  # 2 rounds begin in an iteration, unevenly, for 3 each
    assert working_pages(100, 5000, 24, (2, 200, 0), 100) == 225  # the link serves half a round


def test_cost_grows_with_requests_not_their_square() -> None:
    """Each row is looked at once, and each number of victims tried once, with sums kept from the one before."""
    for count in (100, 1000):
        asked: list[int] = []

        def working(number: int, _: int, asked: list[int] = asked) -> int:
            asked.append(number)
            return 0

        victims(rows(count), 10**9, working)
        assert asked == list(range(1, count + 1))


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 400), st.integers(0, 8), st.booleans()), max_size=8),
    st.floats(1e-5, 1e-2),
)
def test_who_drafts_no_more_leaves_the_link_to_the_next(
    rows: list[tuple[float, int, int, bool]], reload: float
) -> None:
    """Told one by one; who has had few rounds, or pays, drafts on."""
    pace, policy = Pace(0.01, 1e-6, reload), Residency(4)
    all_rows = [(Candidate(str(i), p, g, 99, 0, 20, p / 4), n) for i, (g, p, n, _) in enumerate(rows)]
    held = {str(i) for i, row in enumerate(rows) if row[3]}
    mix = Mix(plain=2, pages=50).drafting(one for one, _ in all_rows if one.request_id not in held)
    found, rest = policy.unpaid(all_rows, held, mix, pace), mix
    for one, rounds in all_rows:
        unpaid = rounds >= ROUNDS and not policy.pays(one, rest, pace)
        assert (one.request_id in found) == unpaid
        if unpaid and one.request_id not in held:
            rest = rest.drafting([one], -1)
