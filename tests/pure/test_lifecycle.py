"""Every pair of state and transition: the legal ones move, the others name both states."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.lifecycle import Round, State, Track, TransitionError
from scheduler.rings import Booking

R, D, W, F, L, V, C, E = State

# Written out by hand from the picture in the module: the states that each transition may start from.
LEGAL: dict[State, set[State]] = {
    D: {R, V},
    W: {D, V},
    C: {D},
    F: {W, V},
    L: {F},
    V: {L},
    R: {D, W, F, L, V, C},
    E: {R, D, W, F, L, V, C},
}
MOVES: dict[State, Callable[[Track], None]] = {
    D: Track.demote,
    W: lambda t: t.wait(70, 9),
    F: lambda t: t.draft_on(41) if t.state is V else t.draft(Round(5)),
    C: Track.certify,
    L: Track.load,
    V: lambda t: t.verify(8),
    R: Track.reside,
    E: Track.finish,
}
PAIRS = [(observed, wanted) for observed in State for wanted in State]


def a_track(state: State) -> Track:
    return Track("r7", state, 40, Round(3, Booking(1, 2, 2, 5, 6), issued=2, known=1), 4)


def test_the_table_of_this_test_knows_every_state() -> None:
    assert set(LEGAL) == set(MOVES) == set(State)


@pytest.mark.parametrize(("observed", "wanted"), [p for p in PAIRS if p[0] in LEGAL[p[1]]], ids=lambda s: s.name)
def test_a_legal_move(observed: State, wanted: State) -> None:
    track = a_track(observed)
    before = track.round
    MOVES[wanted](track)
    assert track.state is wanted
    if wanted is W:
        assert (track.context, track.waiting_since, track.round) == (70, 9, None)
    elif (observed, wanted) == (V, F):
        assert (track.round, track.context, track.verifying) == (before, 41, None), "it began ahead of the result"
    elif wanted is F:
        assert track.round == Round(5)
    elif wanted is L:
        assert track.round is before, "the round goes on"
    elif wanted is V:
        assert before is not None
        assert (track.verifying, track.round) == (before.booking, None)
    else:
        assert track.round is None, "no round outlives its request's drafting"


@pytest.mark.parametrize(("observed", "wanted"), [p for p in PAIRS if p[0] not in LEGAL[p[1]]], ids=lambda s: s.name)
def test_an_illegal_move_names_both_states_and_changes_nothing(observed: State, wanted: State) -> None:
    track = a_track(observed)
    before = (track.state, track.context, track.waiting_since, track.round)
    with pytest.raises(TransitionError) as caught:
        MOVES[wanted](track)
    message = str(caught.value)
    assert f"'r7' cannot go from {observed.name} to {wanted.name}" in message
    for origin in LEGAL[wanted]:
        assert origin.name in message.partition("reached from")[2], "the message says what would have been right"
    assert (caught.value.observed, caught.value.wanted) == (observed, wanted)
    assert (track.state, track.context, track.waiting_since, track.round) == before


@given(st.lists(st.sampled_from(State), max_size=30))
def test_no_sequence_of_moves_leaves_the_picture(wanted: list[State]) -> None:
    """Also not after refused moves."""
    track, state = Track("r"), R
    for target in wanted:
        if state in LEGAL[target]:
            MOVES[target](track)
            state = target
        else:
            with pytest.raises(TransitionError):
                MOVES[target](track)
        assert track.state is state


def test_a_round_may_begin_ahead_of_a_result() -> None:
    track = a_track(V)
    track.draft(Round(7))
    assert (track.state, track.round) == (V, Round(7))


def test_a_new_track_is_resident_and_idle() -> None:
    track = Track("r")
    assert (track.state, track.context, track.round, track.waiting_since) == (R, 0, None, 0)


@given(limit=st.integers(0, 6), ended_after=st.integers(1, 9))
def test_a_round_wants_drafts_until_its_limit_or_an_end_token(limit: int, ended_after: int) -> None:
    round_ = Round(limit)
    while round_.wants_draft:
        round_.issued += 1
        assert not round_.complete
        round_.known += 1
        round_.ended = round_.known == ended_after
    assert round_.complete
    assert round_.issued == min(limit, ended_after)


def test_a_round_is_complete_only_when_every_issued_draft_is_known() -> None:
    assert Round(3).complete, "a verify without drafts is legal"
    assert not Round(3, issued=2, known=1).complete
    assert Round(3, issued=2, known=2).complete
