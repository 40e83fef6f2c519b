"""Certified decode in the scheduler: which requests get a certified row, and what becomes of their results.

Such a request is demoted like one that drafts (full KV to host pages, a sample into an arena slot), then decodes one
row per token over slot and host pages; its own K/V stay exact in the slot's tail. When the tail is full it is computed
anew from its tokens, as after any other loss of its KV, and demoted again: its context is exact then, and its sample
fresh.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vericache.certified.attention import Policy
from vericache.certified.certificate import Bound
from vericache.certified.decided import Decided
from vericache.engine.detached import Detached
from vericache.engine.metrics import Telemetry
from vericache.engine.ops import CertifiedRow, StepReport
from vericache.engine.plan import Certify, StepPlan


@dataclass
class CertifiedSoFar:
    """One request's certified rows."""

    policy: Policy
    rows: int = 0
    decided: Decided = field(default_factory=Decided)

    def summary(self) -> dict[str, Any]:
        """What the response says (JSON types only)."""
        d = self.decided
        return {
            "bound": self.policy.target.bound,
            "epsilon": self.policy.target.eps,
            "delta": self.policy.target.delta,
            "tokens": self.rows,
            "decisions": d.decisions,
            "fetching_decisions": d.fetching,
            "fetched_tokens": d.tokens,
            "fetched_bytes": d.num_bytes,
            "fallbacks": d.fallbacks,
            "largest_certificate": max(d.certificates, default=None),
            "measured_decisions": len(d.measured),
            "largest_measured_error": max(d.measured, default=None),
        }


def refused(v2_runner: bool) -> Mapping[Bound, str]:
    """The bounds that certified rows of this runner do not have, and why (``engine.support.certified_refused`` says it
    to clients, with more reasons)."""
    if not v2_runner:
        return {}
    return {"output": "vLLM's V2 model runner certifies the denominator, not the output; set bound to denominator"}


def begin(policy: Policy | None) -> CertifiedSoFar | None:
    return None if policy is None else CertifiedSoFar(policy)


def plan_row(record: Detached, out: StepPlan) -> None:
    """The next row, once the token before it is known."""
    request = record.request
    assert record.certified is not None
    if not request.num_output_placeholders and record.context == request.num_tokens - 1:
        row = CertifiedRow(record.request_id, record.slot, record.base, record.certified.policy)
        out.certified.append(Certify(record, row))


def count(plan: StepPlan, report: StepReport, telemetry: Telemetry) -> None:
    """Take in what a step's certified rows did."""
    for each in plan.certified:
        found, so_far = report.certified.get(each.record.request_id), each.record.certified
        if found is None or so_far is None:
            continue
        so_far.rows += 1
        total = so_far.decided + found
        # One for every token of a long output would be a long list: the largest is kept.
        so_far.decided = replace(total, certificates=(max(total.certificates),))
        telemetry.certified(found, so_far.policy.target.bound)


def tail_is_full(record: Detached) -> bool:
    """No room for the K/V of the pending token."""
    return record.context - record.filled_at >= record.tail_capacity
