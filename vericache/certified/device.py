"""Certified attention of one position on the device: ``attention.certified_attention`` by kernels, without a wait.

The same turns as the reference's, a fixed number of them: a head that met its target skips those that follow. So the
host never learns what was decided, and no shape depends on it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.certified.attention import ROUNDS, Policy
from vericache.certified.sketch import PerChannel
from vericache.certified.triton_decide import decide
from vericache.certified.triton_rows import HeldRows, HostRows, complete, held_logits, mix, sketch_logits
from vericache.certified.workspace import Workspace


@dataclass(frozen=True)
class DeviceSampled:
    """One layer of a compressed context of n tokens on the device. ``inclusion`` float32 ``[H, n]``: r; ``resident``
    uint8 ``[H, n]``: Z, 1 wherever r is 1."""

    sketch: PerChannel
    inclusion: Tensor
    resident: Tensor
    held: HeldRows
    host: HostRows


@dataclass(frozen=True)
class DeviceOutcome:
    """``output`` float32 ``[H, G, D]``. ``error`` float64 ``[H, G]``, ``fetched`` int64 ``[H]`` and ``fallback`` int32
    ``[H]`` as of ``attention.Outcome``."""

    output: Tensor
    error: Tensor
    fetched: Tensor
    fallback: Tensor


def limits_of(policy: Policy, device: torch.device) -> Tensor:
    """``decide``'s, for ``attend``."""
    numbers = [policy.target.eps, math.log(2 / policy.target.delta), policy.z]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def attend(
    query: Tensor, sampled: DeviceSampled, scale: float, max_fetch: float, limits: Tensor, work: Workspace
) -> DeviceOutcome:
    """``query [H, G, D]``. Of a policy, ``max_fetch`` and ``limits_of`` are read; its shortlist is every token."""
    tokens, held = sampled.inclusion.shape[1], sampled.held
    columns = tokens + held.tail
    most = int(max_fetch * columns)
    work.certain[:, :tokens].copy_(sampled.inclusion == 1)
    work.fallback.zero_()
    sketch_logits(query, sampled.sketch, scale, work)
    held_logits(query, held, tokens, scale, work)
    for turn in range(ROUNDS + 1):
        decide(work, sampled.inclusion, limits, columns, turn, most)
        complete(query, sampled.host, sampled.resident, scale, work, limits, turn, turn == ROUNDS)
    decide(work, sampled.inclusion, limits, columns, ROUNDS + 1, most)
    output = mix(held, sampled.host, sampled.inclusion, sampled.resident, work)
    fetched = (work.certain[:, :tokens] > sampled.resident).sum(-1)
    return DeviceOutcome(output, work.error[ROUNDS + 1].clone(), fetched, work.fallback.clone())


def true_errors(query: Tensor, sampled: DeviceSampled, scale: float, limits: Tensor, work: Workspace) -> Tensor:
    """Of the denominator that ``attend``, which must have come right before, has estimated: the largest relative error
    of each KV head's queries, float64 ``[H]``. Every key is read."""
    columns = sampled.inclusion.shape[1] + sampled.held.tail
    estimated = work.mass.sum(1).double().log() + work.shift
    work.error[0] = math.inf
    complete(query, sampled.host, sampled.resident, scale, work, limits, 0, True)
    log_total = work.exact[..., :columns].double().logsumexp(-1)
    return (estimated - log_total).expm1().abs().amax(-1)
