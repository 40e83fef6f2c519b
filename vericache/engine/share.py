"""Which share of the KV memory the draft arena gets. Pure; what is measured comes from the worker.

On a CPU host and device memory are the same, so there is no link whose price could be weighed: auto means half.
"""

from dataclasses import dataclass

from scheduler.acceptance import USUAL
from scheduler.advice import Workload
from scheduler.arena import Share, auto_share, draft_share
from scheduler.byte_model import Machine
from vericache.config import VeriCacheConfig


@dataclass(frozen=True)
class Facts:
    """Of one rank. ``memory``: bytes for KV, the arena included; ``token``: bytes of one token's KV, of which a page of
    the arena takes ``packed``; bytes per second of the device's memory and of the link; ``seats``: rows of a batch."""

    memory: float
    weights: float
    token: float
    packed: float
    longest: int
    seats: int
    bandwidth: float
    link: float


@dataclass(frozen=True)
class Chosen:
    """And why, in a sentence for the log and the status page."""

    fraction: float
    why: str


ON_CPU = Chosen(0.5, "auto on a CPU")


def fixed(settings: VeriCacheConfig, on_cpu: bool) -> Chosen | None:
    """What is known without looking at the machine."""
    if settings.mode == "off":
        return Chosen(0.0, "mode is off")
    if settings.arena_fraction != "auto":
        return Chosen(settings.arena_fraction, "set by arena_fraction")
    return ON_CPU if on_cpu else None


def choose(settings: VeriCacheConfig, facts: Facts) -> Chosen:
    """arena_fraction auto."""
    context = min(settings.expected_context or max(1, facts.longest // 2), facts.longest)
    machine = Machine(facts.weights + facts.memory, facts.bandwidth, facts.link)
    work, ratio, x = workload(settings, facts, context), settings.ratio, settings.draft_length
    asks, longest = settings.needs_arena, share_of_longest(settings, facts)
    # A verify needs the full KV of the longest request beside the arena.
    most = max(0.0, 1 - facts.token * (facts.longest + 4 * settings.window) / facts.memory)
    where = f"for requests of {context} tokens, {work.drafting} of which the host's memory holds, rho {machine.rho:.0f}"
    if settings.mode == "draft":
        # Where both do not fit, the engine refuses to start (engine.support.check_pool).
        every = min(draft_share(machine, work, ratio, x, longest), max(most, longest))
        return Chosen(every, f"auto: as many as draft in this memory, {where}")
    try:
        share = auto_share(machine, work, ratio, x, longest if asks else 0.0, most)
    except ValueError:
        return Chosen(longest if asks else 0.0, f"auto: not one request fits beside the weights, {where}")
    return Chosen(share.fraction, f"auto: {_told(share, asks)}, {where}")


def workload(settings: VeriCacheConfig, facts: Facts, context: int) -> Workload:
    """Requests of ``context`` tokens, drafts as usual. Their tails are half full on average."""
    held = settings.tail_tokens + settings.window
    tail = facts.token * min(held / 2, context / 2)
    full = max(facts.token * context, 2 * tail)
    reserve = max(0.0, facts.token * min(held, context) - tail)
    drafting = int(settings.host_memory_gib * 2**30 / full)
    residual = settings.residual_reload == "on"
    return Workload(facts.weights, full, USUAL, facts.packed, tail, facts.seats, reserve, drafting, residual)


def share_of_longest(settings: VeriCacheConfig, facts: Facts) -> float:
    """The share that one request of the greatest length takes. Every head can end in two partly filled pages."""
    work = workload(settings, facts, facts.longest)
    pages = 2 * settings.page_tokens * facts.token
    return min(0.9, (1.02 * (work.load(settings.ratio).kept + work.reserve) + pages) / facts.memory)


def _told(share: Share, asks: str | None) -> str:
    if share.fraction:
        kept = "" if asks is None else f" ({asks}, so there is one)"
        return f"predicted to make {_over_plain(share)}{kept}"
    if share.refused is None:
        return "no arena fits beside the longest request"
    return (
        f"no arena pays at every load; the best one, {share.refused.fraction:.2f}, is predicted to make "
        f"{_over_plain(share.refused)}"
    )


def _over_plain(share: Share) -> str:
    return f"{share.speedup:.2f} of plain vLLM's tokens under load and {share.worst:.2f} at the worst load"
