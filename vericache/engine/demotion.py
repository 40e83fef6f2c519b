"""How a request leaves the device: its scoring rows, then one step that copies its KV to the host and compresses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compressors import METHODS
from vericache.engine.blocks import ids
from vericache.engine.detached import Detached
from vericache.engine.ops import Compress, Offload, ProbeRow
from vericache.engine.plan import Bounds, Probing, StepPlan
from vericache.engine.reservations import Reservations


@dataclass(frozen=True)
class Demotion:
    """``texts``: by compressor, token ids that scoring rows append (see ``compressors.Scorer.probes``)."""

    reserved: Reservations
    bounds: Bounds
    texts: Mapping[str, Mapping[str, Sequence[int]]]
    verify_tokens: int

    @property
    def scoring_room(self) -> int:
        """Tokens that scoring rows may take of a step: what all drafts and verifies leave of it."""
        return self.bounds.step_tokens - self.bounds.seats - self.verify_tokens

    def step(self, record: Detached, out: StepPlan) -> str | None:
        """One scoring row per step while there are any, then offload and compress in one step. Returns why the request
        has to be given up, if so."""
        request, context = record.request, record.context
        if request.num_output_placeholders or context != request.num_tokens - 1:
            return None  # the token that ends the context is still in flight
        own = [] if record.anew else self.reserved.blocks.of_request(request)
        held = (own or ids(record.blocks))[: self.reserved.plan.blocks_for(context)]
        device = held + (ids(record.blocks)[len(held) :] if record.anew else ids(record.blocks))
        if record.probes is None:
            tokens = list(request.all_token_ids[:context])
            name = record.spec.name
            record.probes = METHODS[name].probes(tokens, record.spec, self.texts[name])
        if record.probes_sent < len(record.probes):
            return self._score(record, device, out)
        if not record.anew:
            out.before.append(self._offload(record, held))
        probes = len(record.probes)
        op = Compress(record.request_id, record.slot, tuple(held), context, record.spec, probes)
        if record.certified is not None:
            pages, target = tuple(record.host_pages[: len(held)]), record.certified.policy.target
            op = replace(op, pages=pages, bound=target.bound)
        out.before.append(op)
        record.settling = True
        out.settling.append(record)
        return None

    def _offload(self, record: Detached, held: Sequence[int]) -> Offload:
        """What is not in the host yet of the blocks ``held``, the last of which need not be full."""
        pages, full = record.host_pages, record.context // self.reserved.plan.block_tokens
        rest = range(min(record.stored, len(held)), len(held))
        missing = [i for i in rest if i >= full or self.reserved.missing(record.request, pages, i)]
        return Offload(record.request_id, tuple(held[i] for i in missing), tuple(pages[i] for i in missing))

    def _score(self, record: Detached, device: Sequence[int], out: StepPlan) -> str | None:
        assert record.probes is not None
        probe, index, context = record.probes[record.probes_sent], record.probes_sent, record.context
        length = probe.start + len(probe.tokens)
        needed = self.reserved.plan.blocks_for(length)
        too_long = len(probe.tokens) > self.scoring_room or length > self.bounds.max_model_len
        if too_long or needed > len(device):  # the tokenizer's texts are longer than the method's bound
            return "scoring_too_long"
        full = len(out.probes) >= self.bounds.scoring_rows
        if full or out.probe_tokens + len(probe.tokens) > self.scoring_room:
            return None  # another request's scoring row fills this step
        record.probes_sent += 1
        row = ProbeRow(
            record.row_id(f"probe{context}.{index}"),
            record.request_id,
            record.slot,
            index,
            context,
            record.spec,
            tuple(device[:needed]),
            replay=probe.start < context,
        )
        known = record.request.all_token_ids[: probe.start]
        out.probes.append(Probing(record, row, [*known, *probe.tokens], probe.start))
        return None
