"""Parts of scores: found while they are held, held while a pass relies on them, dropped once."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from vericache.engine.score_parts import ScorePart, ScoreParts

CAPACITY, MOST = 40, 12


class World:
    """Passes come and go; ``workers`` hold what they are told to."""

    def __init__(self) -> None:
        self.parts = ScoreParts(CAPACITY)
        self.workers: dict[int, str] = {}
        self.relied: list[tuple[str, ScorePart]] = []
        self.claims: list[tuple[str, ScorePart]] = []  # of passes under way
        self.dropped = Counter[int]()
        self.seen = Counter[str]()

    def take(self, chance: Random) -> None:
        key = chance.choice("abcdefgh")
        if part := self.parts.take(key):
            assert self.workers[part.part_id] == key
            self.relied.append((key, part))
            self.seen["taken"] += 1

    def release(self, chance: Random) -> None:
        if self.relied:
            _, part = self.relied.pop(chance.randrange(len(self.relied)))
            self.parts.release([part])

    def claim(self, chance: Random) -> None:
        key, start = chance.choice("abcdefgh"), chance.randint(0, 9)
        if self.parts.claimed(key) or key in self.parts:
            return
        part = self.parts.claim(key, start, start + chance.randint(1, MOST))
        self.workers[part.part_id] = key
        self.claims.append((key, part))

    def settle(self, chance: Random) -> None:
        """A pass ends."""
        if self.claims:
            key, part = self.claims.pop(chance.randrange(len(self.claims)))
            if chance.random() < 0.2:
                self.parts.drop([(key, part)])
            else:
                self.parts.add(key, part)
                assert key in self.parts

    def withdraw(self, chance: Random) -> None:
        if self.relied and chance.random() < 0.5:
            self.parts.withdraw([chance.choice(self.relied)[1]])
        elif chance.random() < 0.1:
            self.parts.withdraw_all()
            assert not any(key in self.parts for key in "abcdefgh")
        else:
            return
        self.seen["withdrawn"] += 1

    def tell(self, _: Random) -> None:
        for part_id in self.parts.dropped():
            assert self.workers.pop(part_id)
            self.dropped[part_id] += 1

    def check(self) -> None:
        assert all(part.part_id in self.workers for _, part in self.relied), "what a pass relies on is there"
        assert max(self.dropped.values(), default=0) <= 1
        relied = sum({p.part_id: p.tokens for _, p in self.relied}.values())
        assert self.parts.tokens <= CAPACITY + relied, "only what is relied on may be too much"
        assert {key for key, _ in self.claims} == {key for key in "abcdefgh" if self.parts.claimed(key)}


@settings(max_examples=100, deadline=None)
@given(chance=st.randoms(use_true_random=True))
def test_any_order_of_events(chance: Random) -> None:
    world = World()
    for _ in range(200):
        moves = [world.take, world.take, world.release, world.claim, world.settle, world.withdraw, world.tell]
        chance.choice(moves)(chance)
        world.check()
    while world.relied or world.claims:
        world.release(chance)
        world.settle(chance)
    world.parts.withdraw_all()
    world.tell(chance)
    assert not world.workers
    assert not world.parts.tokens


def test_the_longest_unused_goes_first() -> None:
    parts = ScoreParts(30)
    for key in "abc":
        parts.add(key, parts.claim(key, 0, 10))
    found = parts.take("a")
    assert found is not None
    parts.release([found])
    parts.add("d", parts.claim("d", 0, 10))
    assert [key in parts for key in "abcd"] == [True, False, True, True]
    assert parts.dropped() == (2,)
    assert parts.dropped() == ()


def test_one_that_is_too_large_is_not_held() -> None:
    parts = ScoreParts(30)
    parts.add("a", parts.claim("a", 0, 31))
    assert parts.take("a") is None
    assert parts.dropped() == (1,)
