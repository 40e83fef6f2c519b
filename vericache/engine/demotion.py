"""How a request leaves the device: its scoring rows, then one step that copies its KV to the host and compresses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compressors import METHODS
from vericache.engine.blocks import ids
from vericache.engine.detached import Detached
from vericache.engine.ops import Compress, Offload, ProbeRow
from vericache.engine.plan import Bounds, Probing, StepPlan
from vericache.engine.reservations import Reservations
from vericache.engine.score_parts import Key, ScoreParts

Scored = tuple[Key, int, int]  # of a part of scores: key, start and end


@dataclass(frozen=True)
class Demotion:
    """``texts``: by compressor, token ids that scoring rows append (see ``compressors.Scorer.probes``); ``scores``:
    what earlier passes left."""

    reserved: Reservations
    scores: ScoreParts
    reuse_scores: bool
    bounds: Bounds
    texts: Mapping[str, Mapping[str, Sequence[int]]]
    verify_tokens: int
    remember: bool  # which tokens are kept, for reloads that leave them out

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
        while record.probes_sent < len(record.probes):
            scored = self._own_part(record)
            if scored is not None and self.scores.claimed(scored[0]):
                return None  # another pass brings it
            part = self.scores.take(scored[0]) if scored is not None else None
            if part is None:
                return self._score(record, device, scored, out)
            record.known.append(part)
            record.probes_sent += 1
        if not record.anew:
            out.before.append(self._offload(record, held))
        out.before.append(self._compress(record, held))
        record.settling = True
        out.settling.append(record)
        return None

    def _compress(self, record: Detached, held: Sequence[int]) -> Compress:
        assert record.probes is not None
        rows, keep = len(record.probes) - len(record.known), tuple(part for _, part in record.keep)
        op = Compress(
            record.request_id, record.slot, tuple(held), record.context, record.spec, rows,
            known=tuple(record.known), keep=keep, forget=self.scores.dropped(),
        )  # fmt: skip
        if record.certified is None:
            return replace(op, block_tokens=self.reserved.plan.block_tokens if self.remember else None)
        pages, bound = tuple(record.host_pages[: len(held)]), record.certified.policy.target.bound
        return replace(op, pages=pages, bound=bound)

    def _own_part(self, record: Detached) -> Scored | None:
        """The scores that the next row is for, where they hold for other contexts, too: those of full blocks, known by
        vLLM's hash of all tokens up to their end."""
        spec, block_tokens = record.spec, self.reserved.plan.block_tokens
        found = METHODS[spec.name].own_part(spec, record.probes_sent, record.context) if self.reuse_scores else None
        if found is None or found[1] % block_tokens:
            return None
        keys, blocks = self.reserved.blocks.keys(record.request), found[1] // block_tokens
        return ((spec.name, spec.options, spec.sinks, keys[blocks - 1]), *found) if blocks <= len(keys) else None

    def _offload(self, record: Detached, held: Sequence[int]) -> Offload:
        """What is not in the host yet of the blocks ``held``, the last of which need not be full."""
        pages, full = record.host_pages, record.context // self.reserved.plan.block_tokens
        rest = range(min(record.stored, len(held)), len(held))
        missing = [i for i in rest if i >= full or self.reserved.missing(record.request, pages, i)]
        return Offload(record.request_id, tuple(held[i] for i in missing), tuple(pages[i] for i in missing))

    def _score(self, record: Detached, device: Sequence[int], scored: Scored | None, out: StepPlan) -> str | None:
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
        if scored is not None:
            record.keep.append((scored[0], self.scores.claim(*scored)))
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
            first=index == len(record.known),
        )
        known = record.request.all_token_ids[: probe.start]
        out.probes.append(Probing(record, row, [*known, *probe.tokens], probe.start))
        return None
