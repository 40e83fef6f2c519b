"""The planner keeps its books straight through any order of events, and when a request leaves in any state."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import Limits, LockStep, Prefix, Staggered
from scheduler.lifecycle import State
from tests.pure.planner_world import Engine, Wish

# The details of a turn come from a generator with a drawn seed: many small draws would make the machine slow.
chances = st.randoms(use_true_random=True)
LINK, POOL = 20, 12


class PlannerMachine(RuleBasedStateMachine):
    """Requests come, draft, fail, end and are aborted in every state, in any order. Limits stay."""

    limits_vary = False

    @initialize(
        lock_step=st.booleans(),
        depth=st.integers(1, 2),
        named=st.booleans(),
        ahead=st.booleans(),
        window=st.integers(4, 14),
        draft_length=st.integers(1, 8),
        verify_tokens=st.integers(2, 24),
    )
    def start(
        self, lock_step: bool, depth: int, named: bool, ahead: bool, window: int, draft_length: int, verify_tokens: int
    ) -> None:
        policy = LockStep(min(draft_length, window - 3) + 1) if lock_step else Staggered()
        self.engine = Engine(policy, window, draft_length, verify_tokens, Limits(LINK, POOL), depth, named=named)
        self.engine.ahead = ahead and not named
        self.added = 0

    def _wish(self, chance: Random) -> Wish:
        """Often small, so that several rounds run at a time; sometimes all there is. Half of the requests have a prefix
        that others have, too."""
        longest, room = self.engine.window - self.engine.depth, self.engine.window - 1
        span = min(chance.randint(1, longest), chance.randint(1, longest))
        link_ns, pages = chance.randint(0, LINK), min(chance.randint(1, POOL), chance.randint(1, POOL))
        prefix = Prefix(chance.choice("ab"), min(3 * LINK // 2, span * link_ns), POOL // 3)
        shared = prefix if chance.random() < 0.5 and pages >= prefix.pages else None
        return Wish(span, link_ns, pages, chance.randint(0, room), shared)

    def _add(self, chance: Random) -> None:
        self.added += 1
        self.engine.add(f"r{self.added}", self._wish(chance), offloaded=False)

    @rule(chance=chances, count=st.integers(1, 4))
    def add(self, chance: Random, count: int) -> None:
        for _ in range(count if len(self.engine.requests) < 12 else 0):
            self._add(chance)

    @rule(chance=chances, turns=st.integers(1, 20))
    def run(self, chance: Random, turns: int) -> None:
        """As many turns of the loop: plan a step, and take in the results that are due by then."""
        for _ in range(turns):
            if len(self.engine.requests) < 3:
                self._add(chance)
            for name in self._in(State.DEMOTING):
                if chance.random() < 0.6:
                    self.engine.requests[name].wish = self._wish(chance)
                    self.engine.offloaded(name)
            self.engine.tick()
            self.engine.check()
            while len(self.engine.in_flight) >= self.engine.depth:
                self._take_results(chance)
                self.engine.check()

    @precondition(lambda self: self.engine.in_flight)
    @rule(chance=chances)
    def catch_up(self, chance: Random) -> None:
        """The result of the step in flight is known before the next one is planned."""
        self._take_results(chance)

    def _in(self, state: State) -> list[str]:
        return [i for i, t in self.engine.planner.tracks.items() if t.state is state]

    def _take_results(self, chance: Random) -> None:
        engine = self.engine
        for name, drafts in list(engine.results()):
            if drafts is None:
                engine.drafted(name, last=chance.random() < 0.1)
                continue
            outcome = chance.choices(["wait", "compress anew", "fail", "end"], [6, 2, 1, 1])[0]
            if outcome == "wait":  # any number of drafts was accepted, so the next round asks for anything
                engine.verified(name)
                if engine.planner.tracks[name].round is None:
                    engine.requests[name].wish = self._wish(chance)
            elif outcome == "compress anew":
                engine.planner.demote(name)
            else:
                engine.remove(name, engine.planner.reside if outcome == "fail" else engine.planner.finish)

    @rule(chance=chances, abort=st.booleans())
    def leave(self, chance: Random, abort: bool) -> None:
        """An abort or a failure, in whatever state the request is."""
        if states := sorted({t.state.name for t in self.engine.planner.tracks.values()}):
            names = self._in(State[chance.choice(states)])
            self.engine.remove(
                chance.choice(names), self.engine.planner.finish if abort else self.engine.planner.reside
            )

    @rule(pages=st.sampled_from([0, 0, POOL // 3, POOL]))
    def lend(self, pages: int) -> None:
        """Plain rows take pages that were promised to rounds."""
        self.engine.lent = pages

    @precondition(lambda self: self.limits_vary)
    @rule(link_ns=st.integers(1, 2 * LINK), pages=st.integers(-2, POOL))
    def change_limits(self, link_ns: int, pages: int) -> None:
        self.engine.limits = Limits(link_ns, pages)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        if not self.limits_vary:
            assert max(self.engine.rings.pages.cells) <= POOL
            assert max(self.engine.rings.link.cells) <= LINK or isinstance(self.engine.policy, LockStep)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for name in list(self.engine.requests):
                self.engine.remove(name, self.engine.planner.finish)
            self.engine.check_empty()


class VaryingLimitsMachine(PlannerMachine):
    """The same while both limits change between any two iterations, as measured rates and free memory do."""

    limits_vary = True


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
TestPlannerWithVaryingLimits = VaryingLimitsMachine.TestCase
TestPlannerWithVaryingLimits.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["finish", "reside"])
@pytest.mark.parametrize("state", list(State)[1:-1], ids=lambda s: s.name)
def test_a_request_can_leave_in_every_state(state: State, how: str, depth: int) -> None:
    """Its booking is given back, results that arrive afterwards are dropped, and the others go on."""
    engine = Engine(window=12, depth=depth)
    engine.add("a", Wish(span=2, pages=30), state is not State.DEMOTING, certified=state is State.CERTIFIED)
    engine.add("other", Wish(span=2, pages=30))
    for _ in range(20):
        if engine.state("a") is state:
            break
        engine.tick()
        if engine.state("a") is not state:
            engine.take_results()
    assert engine.state("a") is state
    engine.remove("a", getattr(engine.planner, how))
    engine.check()
    engine.run_until(lambda: engine.requests["other"].rounds >= 2, 40)
    engine.check()
    engine.remove("other", engine.planner.finish)
    engine.check_empty()
