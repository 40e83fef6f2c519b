"""The record of one request that is not a plain vLLM row: what it owns and how its rounds went."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from compressors import MethodSpec, Probe
from scheduler.adaptation import wider_ratio
from scheduler.draft_length import DraftLength, Fixed
from vericache.engine.score_parts import Key, ScorePart

if TYPE_CHECKING:
    from vericache.engine.certified import CertifiedSoFar


@dataclass
class Detached:
    """Everything a detached request owns is listed here and released in one place (``Coordinator._release``)."""

    request: Request
    spec: MethodSpec
    slot: int
    arena_units: int  # head pages reserved: the compressed context's bound and ``tail_capacity``
    tail_capacity: int  # tokens behind the compressed context that the reservation holds
    host_pages: list[int]
    lengths: DraftLength = field(default_factory=lambda: Fixed(1))  # the request's own, once it is detached
    since: int = 0  # iteration in which it left the device, or came back
    returning: bool = False  # becomes a plain row after its next verify
    stored: int = 0  # leading blocks that were copied to the host while the prompt was computed
    filled_at: int = 0  # context tokens when the slot was filled
    base: int = 0  # where the tail begins: ``filled_at``, and what left it since for packed pages
    folded: int = 0  # tokens behind ``filled_at`` that were packed, or rounded where pages are simulated
    blocks: list[KVCacheBlock] = field(default_factory=list)  # device blocks held: transient pages, or scratch
    copies: int = 0  # leading ones of these that other requests may use, too
    here: int = 0  # leading ones that another request had reloaded when they were taken
    wider: float | None = None  # the ratio to compress it at anew at the next verify, because its drafts stay wrong
    rounds_before: int = 0  # rounds when the slot was filled
    anew: bool = False  # being compressed again at a verify boundary: ``blocks`` hold the context
    probes: list[Probe] | None = None  # scoring rows; None until the context is complete
    probes_sent: int = 0
    known: list[ScorePart] = field(default_factory=list)  # scores that are held in place of scoring rows
    keep: list[tuple[Key, ScorePart]] = field(default_factory=list)  # scores of the pass to be held, by key
    settling: bool = False  # the compression has been issued
    drafts: list[int] = field(default_factory=list)  # known draft ids of the running round
    shadow_id: str | None = None  # row id of the running round's draft row
    grammar_ahead: int = 0  # drafts by which the request's grammar matcher is ahead of its output
    rounds: list[tuple[int, int]] = field(default_factory=list)  # (drafts verified, drafts accepted)
    drafted_at: float = 0.0  # when the running round's latest draft row was issued, monotonic seconds
    compressed_bytes: int = 0  # compressed pages, their tables and counts, at the last compression
    simulated_bytes: int | None = None  # what they would take if they were packed, where pages are simulated
    full_bytes: int = 1  # full KV of the same context
    kept_bytes: int = 0  # of it, what a reload can leave out: keys and values in the arena, if it may use them
    recoveries: int = 0  # times the request had to become a plain row again
    certified: "CertifiedSoFar | None" = None  # it decodes by certified rows instead of rounds

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def context(self) -> int:
        """Tokens whose KV is exact; the position of the pending token."""
        return self.request.num_computed_tokens

    @property
    def tokens(self) -> int:
        """Context and pending token: while a verify row is under way, as if all its drafts were accepted."""
        return self.context + 1

    def look_back(self, ratio_limit: float | None) -> None:
        """Decide by the rounds so far whether to keep more, up to ``ratio_limit``, from the next verify on."""
        if self.wider is not None:  # there was no room for it: not again before as many rounds
            self.wider, self.rounds_before = None, len(self.rounds)
        elif ratio_limit is not None:
            self.wider = wider_ratio(self.spec.ratio, ratio_limit, self.rounds[self.rounds_before :])

    def row_id(self, kind: str) -> str:
        """Id of an internal batch row. vLLM's request ids are unique and this extends one; every round and probe
        has its own, so that the worker never rewinds a row."""
        return f"{self.request_id}#{kind}"

    def summary(self, resident_reason: str | None = None) -> dict[str, Any]:
        """What the response says about this request (JSON types only). ``resident_reason``: why it ended as a plain
        row, None when it drafted to its end."""
        accepted = sum(a for _, a in self.rounds)
        simulated = {}
        if self.simulated_bytes is not None:  # ``compressed_fraction`` is what the arena really holds
            simulated["simulated_fraction"] = round(self.simulated_bytes / self.full_bytes, 4)
        # Tokens of certified rows stay what they are, wherever the request ends.
        certified_rows = self.certified is not None and (resident_reason is None or self.certified.rows > 0)
        certified = {} if self.certified is None else {"certified": self.certified.summary()}
        return {
            "mode": "certified" if certified_rows else "draft" if resident_reason is None else "resident",
            "reason": resident_reason,
            "recoveries": self.recoveries,
            "compressor": self.spec.name,
            "counts": self.spec.counts,
            "selector": self.spec.selector,
            "ratio": self.spec.ratio,
            "compressed_fraction": round(self.compressed_bytes / self.full_bytes, 4),
            **simulated,
            "rounds": len(self.rounds),
            "draft_tokens": sum(k for k, _ in self.rounds),
            "accepted_tokens": accepted,
            # vLLM's convention: the token the verifier adds is counted.
            "draft_chance": round(self.lengths.chance, 4),
            "acceptance_length": round(1 + accepted / len(self.rounds), 3) if self.rounds else None,
            "drafted_per_round": [k for k, _ in self.rounds],
            "accepted_per_round": [a for _, a in self.rounds],
            **certified,
        }
