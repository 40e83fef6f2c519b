"""What detached requests own, and the pools it comes from.

Arena slots and pages, host pages and device blocks are reserved here and given back here, each exactly once. A
request is reserved all-or-nothing before anything of it moves, with bounds known before any score is.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from vllm.v1.request import Request

from compressors import METHODS, MethodSpec
from vericache.draft.arena import kept_bound, page_bound
from vericache.engine.blocks import DeviceBlocks
from vericache.engine.detached import Detached
from vericache.engine.host_pages import HostPages
from vericache.engine.ledger import CountPool, Fence, IdPool
from vericache.engine.settings import MemoryPlan
from vericache.engine.tails import TailSizes
from vericache.engine.transient import Transient


@dataclass(frozen=True)
class Want:
    """What one request must be given to draft: arena pages, host pages, scratch blocks (and a slot)."""

    units: int
    pages: int
    scratch: int


class Reservations:
    """The pools."""

    def __init__(self, plan: MemoryPlan, blocks: DeviceBlocks, seats: int) -> None:
        self.plan, self.blocks = plan, blocks
        self.tails: TailSizes  # set, and changed, while nothing is reserved
        self.sharing = False  # of host pages among requests, and with them of reloads; as ``tails``
        self.slots = IdPool(seats)
        self.arena = CountPool(plan.arena_pages)
        self.host = HostPages(plan.host_pages)
        self.transient = Transient(blocks)
        self.fence = Fence()
        self._heads = plan.layers * plan.kv_heads

    @property
    def nothing_held(self) -> bool:
        """Everything is back, also what had to wait for steps in flight."""
        return not self.arena.used and self.host.free == self.host.size

    def want(self, request: Request, spec: MethodSpec, tail: int, window: int, own: Sequence[int] = ()) -> Want:
        """Of a request with ``tail`` tokens behind its compressed context that has its ``own`` host pages already."""
        context = request.num_tokens
        pages = max(0, self.plan.blocks_for(context + window) - len(own)) if own else self.pages_beside(request, window)
        return Want(self.units(spec, context, tail), pages, self._scratch(spec, context))

    def fits(self, wants: Sequence[Want]) -> bool:
        """There is enough for all of them."""
        return (
            len(wants) <= self.slots.free
            and sum(w.units for w in wants) <= self.arena.free
            and sum(w.pages for w in wants) <= self.host.free
            and sum(w.scratch for w in wants) <= self.blocks.free
        )

    def open(
        self, request: Request, spec: MethodSpec, tail: int, window: int, own: Sequence[int] = ()
    ) -> Detached | None:
        """Everything a request needs to draft; None and nothing taken when any of it is missing."""
        want = self.want(request, spec, tail, window, own)
        if not self.fits([want]):
            return None
        self.arena.take(want.units)
        slot, host_pages, blocks = self.slots.take(1), self.host.take(want.pages), self.blocks.take(want.scratch)
        assert slot is not None
        assert host_pages is not None
        assert blocks is not None
        held = own or self.hold_prompt(request)
        return Detached(request, spec, slot[0], want.units, tail, [*held, *host_pages], blocks=blocks)

    def close(self, record: Detached) -> None:
        """Give everything back. Host pages and blocks wait for the steps in flight; the slot's pages are freed by the
        worker, which the caller tells before anything fills the slot again."""
        self.give_blocks(record)
        pages, record.host_pages = record.host_pages, []
        self.give_pages(pages)
        self.slots.release([record.slot])
        self.arena.release(record.arena_units)

    def keys(self, request: Request) -> Sequence[Hashable]:
        """By which the host pages of a request's full blocks are found."""
        return self.blocks.keys(request) if self.sharing else ()

    def pages_beside(self, request: Request, window: int) -> int:
        """Host pages for a request and ``window`` tokens more, beside those that ``hold_prompt`` finds."""
        known = self.host.known(self.keys(request), request.num_prompt_tokens // self.plan.block_tokens)
        return self.plan.blocks_for(request.num_tokens + window) - known

    def hold_prompt(self, request: Request) -> list[int]:
        """Become a holder of the leading pages of the prompt that are in the host already. Only full blocks of the
        prompt itself: a verify row writes to none of them."""
        keys = self.keys(request)
        count = self.host.known(keys, request.num_prompt_tokens // self.plan.block_tokens)
        pages = [self.host.find(key) for key in keys[:count]]
        return [self.host.hold(page) for page in pages if page is not None]

    def missing(self, request: Request, pages: list[int], index: int) -> bool:
        """Whether the full block ``index``, whose KV the steps up to this one compute, must be copied to
        ``pages[index]``, where others find it from now on. Not when a page with it is there: that takes its place.
        A request whose block before is filed nowhere, or elsewhere, keeps this one for itself, too."""
        keys = self.keys(request)
        if index >= len(keys) or (index and self.host.find(keys[index - 1]) != pages[index - 1]):
            return True
        found, own = self.host.find(keys[index]), pages[index]
        if found is None:
            self.host.file(own, keys[index])
        elif found != own:
            pages[index] = self.host.hold(found)
            self.give_pages([own])
        return found is None

    def give_pages(self, pages: Sequence[int]) -> None:
        """Let go of host pages; those that nobody else holds are free once no step in flight writes to them."""
        if last := self.host.let_go(pages):
            self.fence.after_in_flight(lambda: self.host.release(last))

    def give_blocks(self, record: Detached) -> None:
        """Return the device blocks a request holds outside vLLM's books."""
        blocks, record.blocks, record.copies, record.here = record.blocks, [], 0, 0
        if blocks:
            self.fence.after_in_flight(lambda: self.transient.give(blocks))

    def take_blocks(self, record: Detached, tokens: int) -> bool:
        """The device blocks of a round; False and nothing taken when too few are free. One that is to come back keeps
        its blocks, so it shares none."""
        copies = 0 if record.returning else self.host.held_by_others(record.host_pages)
        taken = self.transient.take(record.host_pages[:copies], self.plan.blocks_for(tokens))
        if taken is None:
            return False
        record.copies, (record.blocks, record.here) = copies, taken
        return True

    def fold(self, record: Detached) -> int:
        """Strips of verified tokens to fold, as far as ``tails`` says; they leave the tail where pages are packed."""
        strips = self.tails.due(record.context - record.filled_at - record.folded)
        record.folded += strips * self.tails.page_tokens
        if self.tails.packed:
            record.base = record.filled_at + record.folded
        return strips

    def extend_host(self, record: Detached, tokens: int) -> None:
        """Host pages for ``tokens`` tokens, as far as there are any."""
        missing = self.plan.blocks_for(tokens) - len(record.host_pages)
        while missing > 0 and (page := self.host.take(1)) is not None:
            record.host_pages.extend(page)
            missing -= 1

    def extend_tail(self, record: Detached, capacity: int) -> bool:
        """Room for ``capacity`` tokens behind the context; False and nothing taken when the arena is full."""
        more = self._heads * max(0, self.tails.strips(capacity) - self.tails.strips(record.tail_capacity))
        if not self.arena.take(more):
            return False
        record.arena_units += more
        record.tail_capacity = max(capacity, record.tail_capacity)
        return True

    def trim(self, record: Detached, used: int) -> None:
        """Give back what the compressed context, in ``used`` head pages, left of its reservation, but for a page a
        head: compressed anew, as many tokens may be spread otherwise. A selection that fills its budget leaves
        nothing."""
        needed = used + self._heads * (1 + self.tails.strips(record.tail_capacity))
        spare = max(0, record.arena_units - needed)
        self.arena.release(spare)
        record.arena_units -= spare

    def refit(self, record: Detached, spec: MethodSpec, wider: float | None) -> bool:
        """Reserve for compressing the context of a record anew, and set its ``spec``, with the ratio ``wider`` or the
        largest it has had. When the arena has no room for more, the latter shrinks so that the slot's pages suffice.
        False, and nothing taken, when scratch blocks are missing, or pages for ``wider``."""
        spec = replace(spec, ratio=wider or max(spec.ratio, record.spec.ratio))
        missing = self.plan.blocks_for(record.context) + self._scratch(spec, record.context) - len(record.blocks)
        more = max(0, self.units(spec, record.context, record.tail_capacity) - record.arena_units)
        if wider is not None and more > self.arena.free:
            return False
        scratch = self.blocks.take(max(0, missing))
        if scratch is None:
            return False
        record.blocks = record.blocks + scratch
        if self.arena.take(more):
            record.arena_units += more
        else:
            pages = record.arena_units - self._heads * self.tails.strips(record.tail_capacity)
            kept = min(spec.budget(record.context), kept_bound(pages, self._heads, self.tails.page_tokens))
            spec = replace(spec, ratio=kept / record.context)
        record.spec = spec
        return True

    def units(self, spec: MethodSpec, context: int, tail: int) -> int:
        """The most head pages of a slot: a compressed context and ``tail`` tokens behind it."""
        compressed = page_bound(spec.budget(context), self._heads, self.tails.page_tokens)
        return compressed + self._heads * self.tails.strips(tail)

    def _scratch(self, spec: MethodSpec, context: int) -> int:
        """Blocks behind the context for the K/V of appending scoring rows."""
        appended = METHODS[spec.name].appended_tokens(spec, context)
        return -(-appended // self.plan.block_tokens) + 1 if appended else 0
