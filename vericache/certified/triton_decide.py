"""Decisions of certified decode as a Triton kernel: the certificate of every query, and what it asks for.

One program is one query of one KV head. It finds the multipliers' fixed point, the certificate, and, where that misses
the target, the fewest tokens that must become certain, all in loops on the device: nothing is sorted, no shape depends
on data, and the host learns nothing. Sums are in float64, as in ``estimator`` and ``certificate``, whose formulas these
are; arrays are in float32.

The order of fetching is that of ``fetch.fetch_ranks`` with every token on the shortlist: a threshold is sought instead
of a rank, so that nothing needs to be short. Tokens of equal share are fetched together.
"""

import triton
import triton.language as tl
from torch import Tensor

from vericache.certified import sketch
from vericache.certified.workspace import Workspace

BLOCK = 2048  # tokens that a program holds at a time
GROUP = tl.constexpr(sketch.GROUP)  # tokens that share a sigma
NOTHING = tl.constexpr(2147483647)  # a cut that no share reaches
CLOSE = tl.constexpr(1e-13)
NEWTON, STEPS = tl.constexpr(32), tl.constexpr(160)  # as in ``estimator``


def decide(work: Workspace, inclusion: Tensor, limits: Tensor, columns: int, turn: int, most: int) -> None:
    """Judge all queries, or, behind the first ``turn``, those of heads that missed the target in the turn before.

    Args:
        work: ``estimated`` and ``sigma`` of the context, ``exact`` wherever ``certain``; filled are ``upper``,
            ``share``, ``shift``, ``bias``, ``error`` of this turn, ``cut``, ``excessive``.
        inclusion: r, float32 ``[H, n]``.
        limits: float64 ``[3]``: epsilon, ln(2 / delta), z.
        columns: tokens of the context and behind it.
        most: more tokens than that are excessive.
    """
    heads, tokens = inclusion.shape
    group, width = work.exact.shape[1:]
    _decide[(heads * group,)](
        work.estimated, work.sigma, work.exact, inclusion, work.certain, work.upper, work.share, work.shift, work.bias,
        work.error, work.cut, work.excessive, limits, tokens, columns, most, width, work.sigma.shape[-1],
        inclusion.stride(0), turn, heads=heads, group=group, group_pad=triton.next_power_of_2(group),
        block=min(BLOCK, triton.next_power_of_2(columns)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _sampled(  # type: ignore[no-untyped-def]
    upper, share, inclusion, certain, cut, first, tokens, block: tl.constexpr
):  # fmt: skip
    """Weights and probabilities of a block, float64, and which of its tokens are sampled if all with a share of at
    least ``cut`` become certain. Others have weight 0 and probability 1/2."""
    at = first + tl.arange(0, block)
    exists = at < tokens
    sure = tl.load(certain + at, mask=exists, other=1)
    bits = tl.load(share + at, mask=exists, other=0.0).to(tl.int32, bitcast=True)
    mine = exists & (sure == 0) & (bits < cut)
    w = tl.load(upper + at, mask=mine, other=0.0).to(tl.float64)
    return w, tl.load(inclusion + at, mask=mine, other=0.5).to(tl.float64), mine


@triton.jit
def _fixed_point(  # type: ignore[no-untyped-def]
    upper, share, inclusion, certain, cut, start, tokens, block: tl.constexpr
):  # fmt: skip
    """The bias, and the number of sampled tokens: Newton's method inside a bracket (``estimator._fixed_point``), from
    ``start`` or whatever is lower, which must not lie below the root."""
    high = tl.full([], 0.0, tl.float64)
    odds = tl.full([], 0.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    for first in range(0, tokens, block):
        w, r, mine = _sampled(upper, share, inclusion, certain, cut, first, tokens, block)
        high += tl.sum(w * (1 - r), 0)
        odds += tl.sum(tl.where(mine, r / (1 - r), 0.0), 0)
        count += tl.sum(mine.to(tl.int32), 0)
    low = high / (1 + odds) / 2
    high = tl.minimum(high, start)
    bias = high
    step = 0
    going = high > 0
    while going:
        fixed = tl.full([], 0.0, tl.float64)
        slope = tl.full([], 0.0, tl.float64)
        for first in range(0, tokens, block):
            w, r, mine = _sampled(upper, share, inclusion, certain, cut, first, tokens, block)
            light = w * (1 - r)
            middle = mine & (light < bias) & (bias * r < light)
            fixed += tl.sum(tl.where(middle, w, tl.where(bias <= light, light, 0.0)), 0)
            slope += tl.sum(tl.where(middle, r / (1 - r), 0.0), 0)
        root = fixed / (1 + slope)
        low = tl.where(bias < root, tl.maximum(low, bias), low)
        high = tl.where(bias > root, tl.minimum(high, bias), high)
        close = (tl.abs(root - bias) <= CLOSE * bias) | (high - low <= CLOSE * high)
        inside = (low < root) & (root < high) & (step < NEWTON)
        bias = tl.where(close | inside, root, (low + high) / 2)
        step += 1
        going = (~close) & (step < STEPS)
    return bias, count


@triton.jit
def multipliers(w, r, bias):  # type: ignore[no-untyped-def]
    """Lambda of sampled tokens (``estimator.shrinkage``)."""
    light = w * (1 - r)
    return tl.where(bias * r >= light, 1.0, tl.maximum(bias * r / tl.where(light > 0, light, 1.0), r))


@triton.jit
def _certificate(  # type: ignore[no-untyped-def]
    upper, share, inclusion, certain, cut, start, total, log, tokens, block: tl.constexpr
):  # fmt: skip
    """The relative error, the bias and the number of sampled tokens (``certificate.denominator_error``)."""
    bias, count = _fixed_point(upper, share, inclusion, certain, cut, start, tokens, block)
    short = tl.full([], 0.0, tl.float64)
    variance = tl.full([], 0.0, tl.float64)
    largest = tl.full([], 0.0, tl.float64)
    for first in range(0, tokens, block):
        w, r, _ = _sampled(upper, share, inclusion, certain, cut, first, tokens, block)
        part = multipliers(w, r, bias) * w
        short += tl.sum(w - part, 0)
        variance += tl.sum(part * part * (1 - r) / r, 0)
        largest = tl.maximum(largest, tl.max(part / r * tl.maximum(r, 1 - r), 0))
    jump = largest * log / 3
    bound = short + jump + tl.sqrt(jump * jump + 2 * variance * log)
    return tl.where(bound == 0, bound, bound / total), bias, count


@triton.jit(do_not_specialize=["tokens", "columns", "most", "turn"])
def _decide(  # type: ignore[no-untyped-def]
    estimated, sigma, exact, inclusion, certain, upper, share, shift, bias, error, cut, excessive, limits, tokens,
    columns, most, width, sigma_width, r_head, turn, heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head = query // group
    eps = tl.load(limits)
    g = tl.arange(0, group_pad)
    before = error + (turn - 1) * heads * group
    going = tl.full([], 1, tl.int32)
    if turn > 0:
        found = tl.load(before + head * group + g, mask=g < group, other=0.0)
        going = tl.sum(((found <= eps) == 0).to(tl.int32), 0)
    if going == 0:
        tl.store(error + turn * heads * group + query, tl.load(before + query))
    else:
        log, z = tl.load(limits + 1), tl.load(limits + 2).to(tl.float32)
        estimated += query.to(tl.int64) * width
        exact += query.to(tl.int64) * width
        upper += query.to(tl.int64) * width
        share += query.to(tl.int64) * width
        sigma += query.to(tl.int64) * sigma_width
        certain += head.to(tl.int64) * width
        inclusion += head.to(tl.int64) * r_head
        top = tl.full([], float("-inf"), tl.float32)
        for first in range(0, columns, block):
            logits, radius, exists = _logits(estimated, sigma, exact, certain, z, first, tokens, columns, block)
            top = tl.maximum(top, tl.max(tl.where(exists, logits + radius, float("-inf")), 0))
        total = tl.full([], 0.0, tl.float64)
        for first in range(0, columns, block):
            logits, radius, exists = _logits(estimated, sigma, exact, certain, z, first, tokens, columns, block)
            at = first + tl.arange(0, block)
            tl.store(upper + at, tl.exp(logits + radius - top), mask=exists)
            tl.store(share + at, tl.zeros([block], tl.float32), mask=exists)
            total += tl.sum(tl.where(exists, tl.exp(logits - radius - top), 0.0).to(tl.float64), 0)
        tl.debug_barrier()  # other threads read what these wrote
        bound, slack, sampled = _certificate(
            upper, share, inclusion, certain, NOTHING, float("inf"), total, log, tokens, block
        )
        tl.store(shift + query, top)
        tl.store(bias + query, slack)
        tl.store(error + turn * heads * group + query, bound)
        least, chosen = _cut(upper, share, inclusion, certain, bound, slack, sampled, total, eps, log, tokens, block)
        tl.store(cut + query, least)
        tl.store(excessive + query, (chosen > most).to(tl.int32))


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    estimated, sigma, exact, certain, z, first, tokens, columns, block: tl.constexpr
):  # fmt: skip
    """Exact logits of certain tokens and of those behind the context, the sketch's of all others, with a radius."""
    at = first + tl.arange(0, block)
    exists = at < columns
    sure = tl.load(certain + at, mask=at < tokens, other=1)
    known = tl.load(exact + at, mask=exists & (sure != 0), other=0.0)
    guessed = exists & (sure == 0)
    radius = tl.load(sigma + at // GROUP, mask=guessed, other=0.0) * z
    return tl.where(sure != 0, known, tl.load(estimated + at, mask=guessed, other=0.0)), radius, exists


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    upper, share, inclusion, certain, bound, slack, sampled, total, eps, log, tokens, block: tl.constexpr
):  # fmt: skip
    """The largest share whose bearers, and all with a larger one, are enough (as an integer, which orders positive
    numbers alike), and how many these are: found by bisection, since the certificate falls with every one of them."""
    least = tl.full([], NOTHING, tl.int32)
    chosen = tl.full([], 0, tl.int32)
    if (bound <= eps) == 0:
        largest = tl.full([], 0, tl.int32)
        for first in range(0, tokens, block):
            w, r, mine = _sampled(upper, share, inclusion, certain, NOTHING, first, tokens, block)
            weighed = multipliers(w, r, slack) * w
            gain = (w - weighed + weighed * tl.sqrt((1 - r) / r)).to(tl.float32)
            tl.store(share + first + tl.arange(0, block), gain, mask=mine)
            largest = tl.maximum(largest, tl.max(tl.where(mine, gain.to(tl.int32, bitcast=True), 0), 0))
        tl.debug_barrier()
        least = tl.full([], 0, tl.int32)  # all: no error
        never = largest + 1  # none
        left = tl.full([], 0, tl.int32)  # sampled tokens with ``least``
        more = sampled  # with ``never``
        start = slack
        while (more - left > 1) & (never - least > 1):
            middle = least + (never - least) // 2
            found, at, rest = _certificate(upper, share, inclusion, certain, middle, start, total, log, tokens, block)
            enough = found <= eps
            least = tl.where(enough, middle, least)
            left = tl.where(enough, rest, left)
            start = tl.where(enough, start, at)  # fewer sampled tokens, less bias
            more = tl.where(enough, more, rest)
            never = tl.where(enough, never, middle)
        chosen = sampled - left
    return least, chosen
