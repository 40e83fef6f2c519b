"""Host pages and device blocks that several requests use: kept once, written by nobody, given back by the last."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from vericache.engine.blocks import DeviceBlocks, ids
from vericache.engine.host_pages import HostPages
from vericache.engine.losses import without_copy, without_reload
from vericache.engine.ops import Failure, Load, Offload, StepReport
from vericache.engine.plan import StepPlan
from vericache.engine.reservations import Reservations

BLOCK = 4  # tokens
HOST, DEVICE = 40, 30
SIZES = {"host_pages": HOST, "arena_pages": 0, "layers": 1, "kv_heads": 1, "block_tokens": BLOCK}


@dataclass(eq=False)
class Actor:
    """A request and its record at once, as far as ``Reservations`` and ``losses`` look at them. Its KV is
    its tokens."""

    request_id: str
    tokens: tuple[int, ...]
    host_pages: list[int] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    copies: int = 0
    here: int = 0
    stored: int = 0  # leading blocks in the host
    relies: bool = False  # all of it is
    lost: bool = False  # a copy failed, and they are not all made anew yet
    returning: bool = False
    skip_reading_prefix_cache: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[tuple[int, ...]]:
        return [self.tokens[: i + BLOCK] for i in range(0, len(self.tokens) - BLOCK + 1, BLOCK)]

    def content(self, index: int) -> tuple[int, ...]:
        return self.tokens[: (index + 1) * BLOCK]


class World:
    """Requests are copied to the host block by block, reload, verify, fail and leave in any order, with steps in
    flight: what failed is known when a step ends. ``host`` and ``device`` hold what was written where; ``seen`` counts
    what happened."""

    def __init__(self) -> None:
        self.pool = BlockPool(DEVICE, True, BLOCK)
        manager = SimpleNamespace(block_pool=self.pool, enable_caching=True)
        manager.coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=BLOCK)])
        plan = SimpleNamespace(**SIZES, blocks_for=lambda tokens: -(-tokens // BLOCK))
        self.reserved = Reservations(plan, DeviceBlocks(manager), 100)
        self.reserved.sharing = True
        self.host, self.device = dict[int, object](), dict[int, object]()
        self.writer = dict[int, Actor]()  # of a host page
        self.actors: list[Actor] = []
        self.seen = Counter[str]()
        self.failed: list[Offload | Load] = []  # in a step whose result is not known

    # -- requests

    def come(self, chance: Random) -> None:
        """Most prompts begin like others."""
        length = chance.randint(BLOCK, 6 * BLOCK)
        depth = chance.randint(0, length)
        tokens = (*[chance.choice([0, 0, 0, 1])] * depth, *(chance.randint(2, 3) for _ in range(length - depth)))
        self.seen["came"] += 1
        actor = Actor(f"r{self.seen['came']}", tokens)
        want = self.reserved.pages_beside(actor, BLOCK)
        if want > self.reserved.host.free:
            return
        actor.host_pages = [*self.reserved.hold_prompt(actor), *self.reserved.host.take(want)]
        assert len(actor.host_pages) == -(-(length + BLOCK) // BLOCK)
        self.actors.append(actor)

    def _some(self, chance: Random, relies: bool) -> Actor | None:
        found = [a for a in self.actors if a.relies is relies]
        return chance.choice(found) if found else None

    def copy(self, chance: Random) -> None:
        """Some more blocks to the host, full ones; or all that is left. Sometimes the copy fails."""
        if (actor := self._some(chance, relies=False)) is None:
            return
        full, last = len(actor.tokens) // BLOCK, -(-len(actor.tokens) // BLOCK)
        end = chance.choice([chance.randint(actor.stored, full), last])
        missing = [
            i for i in range(actor.stored, end) if i >= full or self.reserved.missing(actor, actor.host_pages, i)
        ]
        fails = bool(missing) and chance.random() < 0.15
        pages = tuple(actor.host_pages[i] for i in missing)
        for i, page in zip(missing, pages, strict=True):
            users = [a for a in self.actors if a is not actor and page in a.host_pages[: a.stored]]
            assert not users, "nobody relies on a page that is written"
            self.host[page], self.writer[page] = "lost" if fails else actor.content(i), actor
        actor.stored, actor.relies, actor.lost = end, end == last, actor.lost and end < last
        if fails:
            self.failed.append(Offload(actor.request_id, (0,) * len(pages), pages))

    def _copy_failed(self, op: Offload) -> None:
        holders = {a.request_id: a.host_pages for a in self.actors}
        hit = without_copy(*_report(op), lambda: holders, self.reserved)
        self.seen["lost a copy"] += 1
        for actor in [a for a in self.actors if a.request_id in hit]:
            self.seen["lost another's copy"] += actor.request_id != op.request_id
            if actor.relies:
                self._leave(actor)
            actor.stored, actor.lost = 0, True

    # -- rounds

    def load(self, chance: Random) -> None:
        actor = self._some(chance, relies=True)
        if actor is None or actor.blocks:
            return
        free = self.reserved.blocks.free
        if not self.reserved.take_blocks(actor, len(actor.tokens) + 1):
            assert self.reserved.blocks.free == free
            return
        self.seen["shared a reload"] += actor.here > 0
        rest = slice(actor.here, -(-len(actor.tokens) // BLOCK))
        fails = chance.random() < 0.1
        for block, page in zip(ids(actor.blocks)[rest], actor.host_pages[rest], strict=True):
            assert self.pool.blocks[block].ref_cnt == 1, "nobody else uses a block that is written"
            self.device[block] = "lost" if fails else self.host[page]
        if fails:
            pages, blocks = actor.host_pages[rest], ids(actor.blocks)[rest]
            self.failed.append(Load(actor.request_id, tuple(pages), tuple(blocks)))

    def _reload_failed(self, op: Load) -> None:
        hit = without_reload(*_report(op), self.actors, self.reserved)
        assert any(a.request_id == op.request_id for a in self.actors) <= (op.request_id in {a.request_id for a in hit})
        self.seen["lost another's reload"] += any(a.request_id != op.request_id for a in hit)
        for actor in hit:
            self._leave(actor)

    def verify(self, chance: Random) -> None:
        """The row reads all of its blocks, and writes behind its tokens, into blocks and pages of its own."""
        actor = chance.choice([*(a for a in self.actors if a.blocks), None])
        if actor is None or self.failed:
            return
        self.seen["verified"] += 1
        first = len(actor.tokens) // BLOCK
        last = -(-len(actor.tokens) // BLOCK)
        assert [self.device[b] for b in ids(actor.blocks)[:last]] == [actor.content(i) for i in range(last)]
        for block, page in zip(actor.blocks[first:], actor.host_pages[first:], strict=False):
            assert block.ref_cnt == 1
            assert not any(page in a.host_pages for a in self.actors if a is not actor)
        if actor.returning and self.reserved.transient.keep(actor.blocks):
            assert all(block.ref_cnt == 1 for block in actor.blocks)
            self.seen["came back"] += 1
            blocks, actor.blocks = actor.blocks, []
            self.reserved.blocks.give(blocks)  # vLLM's from here on
            self._leave(actor)
        else:
            self.reserved.give_blocks(actor)

    def mark(self, chance: Random) -> None:
        if self.actors:
            chance.choice(self.actors).returning = True

    # -- leaving, and steps in flight

    def leave(self, chance: Random) -> None:
        if self.actors:
            self._leave(chance.choice(self.actors))

    def _leave(self, actor: Actor) -> None:
        self.actors.remove(actor)
        self.reserved.give_blocks(actor)
        self.reserved.give_pages(actor.host_pages)

    def turn(self, chance: Random) -> None:
        """A step begins, or ends."""
        fence = self.reserved.fence
        in_flight = fence.scheduled - fence.done  # at most two
        if in_flight < 2 and (not in_flight or chance.random() < 0.5):
            fence.step_scheduled()
        elif in_flight:
            failed, self.failed = self.failed, []
            for op in failed:
                self._copy_failed(op) if isinstance(op, Offload) else self._reload_failed(op)
            fence.step_done()

    # -- what holds at any time

    def who_relies_on_a_page_finds_its_tokens_there(self) -> None:
        for actor in self.actors:
            if actor.relies and not self.failed:
                count = -(-len(actor.tokens) // BLOCK)
                pages = actor.host_pages[:count]
                assert [self.host[p] for p in pages] == [actor.content(i) for i in range(count)]

    def pages_that_are_not_mixed_hold_what_their_holder_computed(self) -> None:
        for actor in self.actors:
            if actor.relies:
                first = self.reserved.host.mixed(actor.host_pages)
                assert first >= actor.copies
                assert first >= self.reserved.host.held_by_others(actor.host_pages)
                count = -(-len(actor.tokens) // BLOCK)
                assert all(self.writer[page] is actor for page in actor.host_pages[first:count])

    def pages_and_blocks_are_counted_once(self) -> None:
        host, transient = self.reserved.host, self.reserved.transient
        held = {page for a in self.actors for page in a.host_pages}
        assert len(held) <= host.size - host.free
        blocks = {b.block_id for a in self.actors for b in a.blocks}
        assert len(blocks) <= self.reserved.blocks.used
        if not self.reserved.fence.pending:
            assert len(held) == host.size - host.free
            assert len(blocks) == self.reserved.blocks.used
            assert host.share == (len(held) / total if (total := sum(len(a.host_pages) for a in self.actors)) else 1.0)
            copies = {page for a in self.actors for page in a.host_pages[: a.copies]}
            assert len(transient) <= len(copies)
        sharing = [a for a in self.actors if not a.lost]
        for actor in sharing:
            users = [sum(page in a.host_pages for a in sharing) for page in actor.host_pages]
            assert users == sorted(users, reverse=True)

    def equal_prompts_share_all_they_can(self) -> None:
        """Two requests of the same tokens whose KV is in the host hold the same full pages."""
        first: dict[tuple[int, ...], Actor] = {}
        for actor in self.actors:
            other = first.setdefault(actor.tokens, actor)
            if actor.relies and other.relies and not self.failed and not self.reserved.fence.pending:
                full = len(actor.tokens) // BLOCK
                filed = all(self.reserved.host.find(key) is not None for key in actor.block_hashes)
                assert not filed or actor.host_pages[:full] == other.host_pages[:full]

    def close(self) -> None:
        while self.actors:
            self._leave(self.actors[0])
        while self.reserved.fence.done < self.reserved.fence.scheduled:
            self.reserved.fence.step_done()
        assert self.reserved.nothing_held
        assert not len(self.reserved.transient)
        assert not self.reserved.blocks.used
        host = self.reserved.host
        assert not any((host._filed, host._keys, host._more, host._holders, host._mixed))


def _report(op: Offload | Load) -> tuple[StepPlan, StepReport]:
    """Of a step in which it failed."""
    return StepPlan(before=[op]), StepReport([Failure(op.request_id, type(op).__name__, "")])


def test_what_is_shared_is_kept_once_and_never_written_or_given_away_while_it_is_used() -> None:
    seen = Counter[str]()

    @settings(max_examples=200, deadline=None)
    @given(chance=st.randoms(use_true_random=True))
    def run(chance: Random) -> None:
        world = World()
        moves = [world.come, world.copy, world.load, world.verify, world.turn, world.mark, world.leave]
        for _ in range(250):
            chance.choices(moves, [4, 6, 6, 5, 6, 0.5, 1])[0](chance)
            world.who_relies_on_a_page_finds_its_tokens_there()
            world.pages_that_are_not_mixed_hold_what_their_holder_computed()
            world.pages_and_blocks_are_counted_once()
            world.equal_prompts_share_all_they_can()
        seen.update(world.seen)
        world.close()

    run()
    assert min(seen.values()) > 0, seen


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_the_prefix_that_saves_most(depths: list[int]) -> None:
    """Of all prefixes of one request's pages: leading pages times the share of holders that need not bring them."""
    pages = HostPages(100)
    own = pages.take(60)
    for depth in depths:
        for page in own[:depth]:
            pages.hold(page)
    holders = [1 + sum(depth > i for depth in depths) for i in range(60)]
    saved = [i * (1 - 1 / holders[i - 1]) if i else 0.0 for i in range(61)]
    found = pages.worth_sharing(own)
    assert saved[found] == pytest.approx(max(saved))
    assert pages.held_by_others(own) == max(depths)


def test_a_page_is_found_until_its_last_holder_lets_go() -> None:
    pages = HostPages(4)
    first, second = pages.take(2)
    pages.file(first, "a")
    pages.file(second, "b")
    assert pages.known(["a", "b", "c"], 3) == 2
    assert pages.known(["a", "b", "c"], 1) == 1
    assert pages.hold(first) == first
    assert pages.share == 2 / 3
    assert pages.let_go([first, second]) == [second]
    assert (pages.find("a"), pages.find("b"), pages.free) == (first, None, 2)
    assert pages.let_go([first]) == [first]
    assert (pages.find("a"), pages.free) == (None, 2)
    pages.release([first, second])
    assert (pages.free, pages.share) == (4, 1.0)


def test_what_nobody_finds_any_more_stays_with_its_holders() -> None:
    pages = HostPages(4)
    (page,) = pages.take(1)
    pages.file(page, "a")
    pages.hold(page)
    pages.withdraw_all()
    assert pages.find("a") is None
    assert pages.held_by_others([page]) == 1
    assert pages.let_go([page]) == []
    pages.release(pages.let_go([page]))
    assert pages.free == 4


def test_requests_share_only_where_vllms_prefix_cache_would() -> None:
    actor = Actor("r", (1,) * 8)
    pool = BlockPool(DEVICE, True, BLOCK)
    manager = SimpleNamespace(block_pool=pool, enable_caching=True)
    inner = SimpleNamespace(block_size=BLOCK)
    manager.coordinator = SimpleNamespace(single_type_managers=[inner])
    blocks = DeviceBlocks(manager)
    assert len(blocks.keys(actor)) == 2
    refusals = defaultdict(list)
    changes = [(actor, "skip_reading_prefix_cache", True), (manager, "enable_caching", False), (inner, "block_size", 8)]
    for holder, name, value in changes:
        before = getattr(holder, name)
        setattr(holder, name, value)
        refusals[name] = list(blocks.keys(actor))
        setattr(holder, name, before)
    assert set(map(len, refusals.values())) == {0}
