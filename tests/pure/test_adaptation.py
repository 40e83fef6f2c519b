"""When more of a context is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.adaptation import ROUNDS, SHARE, wider_ratio

BAD, GOOD = (20, 1), (20, 20)


@pytest.mark.parametrize(
    ("ratio", "most", "rounds", "wanted"),
    [
        (0.1, 1.0, [BAD] * ROUNDS, 0.2),
        (0.4, 0.5, [BAD] * ROUNDS, 0.5),
        (0.5, 0.5, [BAD] * ROUNDS, None),
        (0.1, 1.0, [BAD] * (ROUNDS - 1), None),
        (0.1, 1.0, [GOOD, *[BAD] * ROUNDS], 0.2),
        (0.1, 1.0, [*[BAD] * ROUNDS, GOOD], None),
        (0.1, 1.0, [*[BAD] * (ROUNDS - 1), (0, 0)], None),
        (0.1, 1.0, [(4, 1)] * ROUNDS, None),
    ],
)
def test_what_is_kept(ratio: float, most: float, rounds: list[tuple[int, int]], wanted: float | None) -> None:
    assert wider_ratio(ratio, most, rounds) == wanted


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1))))
def test_it_only_grows_and_never_beyond_the_limit(ratio: float, most: float, drawn: list[tuple[int, float]]) -> None:
    rounds = [(drafted, int(share * drafted)) for drafted, share in drawn]
    found = wider_ratio(ratio, most, rounds)
    assert found is None or ratio < found <= most
    if all(accepted >= SHARE * drafted for drafted, accepted in rounds):
        assert found is None
