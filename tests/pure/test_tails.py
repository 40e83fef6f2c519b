"""Tails and folds in numbers."""

from hypothesis import given
from hypothesis import strategies as st

from vericache.engine.tails import TailSizes

sizes = st.builds(
    TailSizes, st.sampled_from([16, 32, 64]), st.sampled_from([1, 2, 8, 16]), st.booleans(), st.integers(0, 40),
    st.integers(4, 64),
)  # fmt: skip


@given(sizes, st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=40), st.integers(1, 600))
def test_the_reservation_holds_whatever_rounds_do(
    tails: TailSizes, rounds: list[tuple[float, float]], capacity: int
) -> None:
    """Rounds draft as far as there is room, any part of it is accepted, and full pages are folded; the next round
    begins before the result is known, and reckons with everything accepted."""
    tokens = uncompressed = folded = 0
    for drafts, taken in rounds:
        room = tails.room(uncompressed, tokens, capacity) - 1
        if room < 0:
            break
        drafted = int(drafts * min(room, tails.window))
        ahead = tails.room(uncompressed + drafted + 1, tokens + drafted + 1, capacity) - 1
        for behind in (drafted + 1, drafted + 1 + max(0, min(ahead, tails.window))):
            strips = -(-(uncompressed + min(behind, room + 1)) // tails.tail_page_tokens)
            assert folded + strips <= tails.strips(capacity)
        accepted = 1 + int(taken * drafted)
        tokens, uncompressed = tokens + accepted, uncompressed + accepted
        strips = tails.due(uncompressed)
        folded, uncompressed = folded + strips, uncompressed - strips * tails.page_tokens
        assert uncompressed >= min(tokens, tails.keep)
        assert not tails.packed or uncompressed < tails.keep + tails.page_tokens


@given(sizes, st.integers(0, 600), st.integers(0, 600))
def test_more_tokens_never_take_fewer_pages(tails: TailSizes, a: int, b: int) -> None:
    assert tails.strips(min(a, b)) <= tails.strips(max(a, b))


def test_simulated_pages_fold_like_packed_ones_and_stay_like_plain_ones() -> None:
    packed, plain, simulated = (TailSizes(32, 32, p, 8, 64, s) for p, s in ((1, 0), (0, 0), (0, 1)))
    assert simulated.due(500) == packed.due(500) > 0
    assert simulated.strips(500) == plain.strips(500)
    assert simulated.room(400, 400, 500) == plain.room(400, 400, 500)


def test_unpacked_tails_are_not_folded() -> None:
    tails = TailSizes(32, 32, False, 8, 64)
    assert (tails.due(500), tails.strips(500), tails.room(400, 400, 500)) == (0, 16, 100)
