"""How much of the memory for KV the draft arena gets, before anything is served.

The arena is taken from plain rows for good, so it has to earn that: by more tokens with many requests, and by no fewer
with any other number of them. Where few contexts fit, it costs a whole row or two of a handful, and a link that is slow
beside the memory never makes up for them.
"""

from dataclasses import dataclass, replace

from scheduler import byte_model as model
from scheduler.advice import ARENAS, WORTH, Workload, baseline, elastic
from scheduler.byte_model import Machine

SAFE = 0.99  # of plain vLLM's rate, at every load: less is more than the rounding of a row
LARGEST = 0.7  # share of an arena in which all requests draft
LOADS = 32  # numbers of requests that are looked at


@dataclass(frozen=True)
class Share:
    """``fraction`` of the memory for KV is the arena. Tokens per second over plain vLLM's, as predicted: ``speedup``
    with all the requests that help, ``worst`` of all loads. Without an arena, ``refused`` is the one that came closest.
    """

    fraction: float
    speedup: float = 1.0
    worst: float = 1.0
    refused: "Share | None" = None


def auto_share(
    machine: Machine, work: Workload, ratio: float, drafts: int, least: float = 0.0, most: float = 1.0
) -> Share:
    """The arena that makes mode auto fastest with many requests, of those that slow it down at no load; 0 where the
    best of them gains less than the model's error (``WORTH``).

    ``least`` above 0: there has to be an arena of that size; where none is worth it, the one that costs least.
    ``most``: what may be taken from plain rows, which gives way to ``least`` only.

    Raises:
        ValueError: not one request fits.
    """
    shares = sorted({s for s in (*ARENAS, least) if 0 < s <= most and s >= least})
    found = [foreseen(machine, work, ratio, drafts, share) for share in shares]
    if good := [one for one in found if one.speedup >= WORTH and one.worst >= SAFE]:
        return max(good, key=lambda one: one.speedup)
    if least:
        return max(found, key=lambda one: (min(one.worst, one.speedup), one.speedup), default=Share(least))
    return Share(0.0, refused=max(found, key=lambda one: (one.speedup, one.worst), default=None))


def draft_share(machine: Machine, work: Workload, ratio: float, drafts: int, least: float = 0.0) -> float:
    """Where all requests draft: an arena for as many as memory holds beside the contexts of their rounds."""
    load = work.load(ratio)
    rows = work.drafters(work.rows(model.room_staggered(machine, load, drafts)))
    return max(least, min(LARGEST, rows * (load.kept + work.reserve) / (machine.memory - work.weights)))


def foreseen(machine: Machine, work: Workload, ratio: float, drafts: int, share: float) -> Share:
    """What an arena of this size is predicted to do."""
    full = model.room_plain(machine, work.load(1.0))
    every = [work.batch, *loads(full, share, work.batch)]
    rates = [_over_plain(machine, work, ratio, drafts, share, batch) for batch in every]
    return Share(share, rates[0], min(rates))


def loads(full: int, share: float, batch: int | None) -> list[int]:
    """Numbers of requests, at most ``batch``, at which an arena may do harm: from where plain rows no longer hold all
    to twice the ``full`` number that plain vLLM holds."""
    first, last = max(1, int((1 - share) * full)), 2 * full
    wanted = {*range(first, last, max(1, (last - first) // LOADS)), max(1, full - 1), full, full + 1}
    return sorted(n for n in wanted if batch is None or n <= batch)


def _over_plain(machine: Machine, work: Workload, ratio: float, drafts: int, share: float, batch: int | None) -> float:
    at = replace(work, batch=batch)
    found = elastic(machine, at, ratio, drafts, share)
    return found.tokens_per_s / baseline(machine, at).tokens_per_s if found is not None else 0.0
