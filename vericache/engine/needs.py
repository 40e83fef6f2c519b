"""What the planner asks about one request (``scheduler.planner.Host``): how far a round may draft, what it costs; and
the blocks there are for rounds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from vllm.v1.request import Request

from scheduler.admission import Demand, Prefix, reload_span
from scheduler.draft_length import fair
from scheduler.lifecycle import State
from scheduler.planner import Planner
from scheduler.residency import working_pages
from scheduler.throughput import Throughput
from vericache.engine.detached import Detached
from vericache.engine.plan import Bounds
from vericache.engine.reservations import Reservations
from vericache.engine.residual import Residual


@dataclass(frozen=True)
class RoundNeeds:
    """Reads the coordinator's records; takes a round's transient blocks when the planner asks for them."""

    records: Mapping[str, Detached]
    planner: Planner
    reserved: Reservations
    bounds: Bounds
    throughput: Throughput
    tail_tokens: int
    residual: Residual

    def draft_length(self, request_id: str) -> int:
        record = self.records[request_id]
        most = self.planner.rings.window - 2
        return record.lengths.aim(self.bounds.depth, self.fair_length(record.tokens), most)

    def fair_length(self, tokens: int, more: int = 0) -> int:
        """The shortest round with which link and blocks suffice for all that draft and ``more``, were all as large and
        their prefixes shared as those in the host are and as much of each in the arena."""
        span, link_ns, hold = self._reload(tokens)
        limits, pages = self.planner.limits, self.reserved.plan.blocks_for(tokens)
        room = max(pages, limits.pages) if limits is not None else pages
        rows, iteration = (len(self.records) + more) * self.reserved.host.share, self.throughput.iteration_ns
        return max(span, fair(rows, link_ns / iteration, (span + 1 + hold) * pages / room))

    def draft_limit(self, request_id: str) -> int:
        record, tails = self.records[request_id], self.reserved.tails
        return max(
            0,
            min(
                self.output_left(record) - 1,
                tails.room(record.context - record.base, record.context - record.filled_at, record.tail_capacity) - 1,
                len(record.host_pages) * self.reserved.plan.block_tokens - record.tokens,
                self.planner.rings.window - 1,
            ),
        )

    def drafts_ahead(self, request_id: str) -> bool:
        """Only where a row's state is on the device: there the draft row finds out by itself which tokens were
        accepted. Never where the result may call for anything else than a round."""
        record = self.records[request_id]
        if record.wider or record.returning or self._seen_by_host(record.request):
            return False
        return self.tail_lasts(record) and self.draft_limit(request_id) > 0

    def _seen_by_host(self, request: Request) -> bool:
        """The host must know drafts before the verify row, and its result before the next round."""
        return not self.bounds.own_rows or request.use_structured_output

    def tail_lasts(self, record: Detached) -> bool:
        """The tail can hold another whole round, or all output that is left."""
        used = record.context - record.filled_at
        return used < self.tail_tokens or used + self.output_left(record) < record.tail_capacity

    def output_left(self, record: Detached) -> int:
        """Tokens the request may still get."""
        request = record.request
        made = request.num_output_tokens + request.num_output_placeholders
        return min(request.max_tokens - made, self.bounds.max_model_len - record.tokens)

    def demand(self, request_id: str, anchor: int) -> Demand:
        record = self.records[request_id]
        span, link_ns, hold = self._reload_bytes(self.residual.full(record) - self.residual.saved(record))
        named = self._seen_by_host(record.request)
        pages = self.reserved.plan.blocks_for(record.tokens + self.draft_limit(request_id))
        return Demand(anchor, span, link_ns, pages, hold, named, self._prefix(record, link_ns))

    def _prefix(self, record: Detached, link_ns: int) -> Prefix | None:
        """What others reload, too. One that is to come back needs blocks of its own."""
        count = 0 if record.returning else self.reserved.host.worth_sharing(record.host_pages)
        if not count:
            return None
        seconds = count * self.reserved.plan.block_bytes / self.throughput.bandwidth.value
        return Prefix(record.host_pages[count - 1], min(link_ns, ceil(seconds * 1e9)), count)

    def working_blocks(self, joining: Sequence[Request], draft_length: int) -> int:
        """Blocks that rounds hold on average while all requests, and those ``joining``, draft, as far as the link lets
        them; at least those of the largest one."""
        tokens = max((*(r.tokens for r in self.records.values()), *(r.num_tokens for r in joining)))
        return self.working(tokens, len(self.records) + len(joining), draft_length)

    def working(self, tokens: int, rows: float, draft_length: int) -> int:
        """``working_blocks`` of so many requests, the largest of which has ``tokens`` tokens."""
        window = self.planner.rings.window
        each = self.reserved.plan.blocks_for(min(tokens + window, self.bounds.max_model_len))
        rows *= self.reserved.host.share
        return working_pages(each, rows, draft_length, self._reload(tokens), self.throughput.iteration_ns)

    def transient_blocks(self, running: Iterable[Request], head_blocks: int) -> int:
        """Blocks that transient KV may use: free ones and those rounds hold already, minus what plain rows and
        the first waiting request will need within the window."""
        in_rounds = (State.LOADING, State.VERIFYING)
        rounds = [self.records[i] for i, t in self.planner.tracks.items() if t.state in in_rounds]
        copies = sum(r.copies for r in rounds)  # of which some are the same
        held = sum(len(r.blocks) for r in rounds) - copies + min(copies, len(self.reserved.transient))
        growth = 0
        for request in running:
            growth += max(0, self.soon(request) - self.reserved.plan.blocks_for(request.num_computed_tokens))
        return self.reserved.blocks.free + held - growth - head_blocks

    def soon(self, request: Request) -> int:
        """Blocks of a plain row within the window."""
        end = request.num_prompt_tokens + request.max_tokens
        tokens = max(request.num_prompt_tokens, min(request.num_tokens + self.planner.rings.window, end))
        return self.reserved.plan.blocks_for(min(tokens, self.bounds.max_model_len))

    def _reload(self, tokens: int) -> tuple[int, int, int]:
        """Of a request of so many tokens, of which as much is in the arena as of the others: see ``_reload_bytes``."""
        full = self.reserved.plan.blocks_for(tokens) * self.reserved.plan.block_bytes
        return self._reload_bytes(ceil(full * self.residual.crossing))

    def _reload_bytes(self, num_bytes: int) -> tuple[int, int, int]:
        """Iterations, link time, and iterations that pages are held after the verify."""
        bandwidth, iteration = self.throughput.bandwidth.value, self.throughput.iteration_ns
        hold = self.bounds.depth - 1
        return *reload_span(num_bytes, bandwidth, iteration, self.planner.rings.window - hold), hold

    def take_pages(self, request_id: str) -> bool:
        record, round_ = self.records[request_id], self.planner.tracks[request_id].round
        assert round_ is not None
        return self.reserved.take_blocks(record, record.tokens + round_.limit)
