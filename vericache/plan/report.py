"""The figures of a plan, as one JSON object."""

import math
from dataclasses import dataclass
from typing import Any

from scheduler import byte_model as model
from scheduler.advice import Choice, Workload, elastic, modes, recommend
from scheduler.arena import auto_share
from scheduler.byte_model import Machine, Prediction, Rounds
from scheduler.remote_model import Remote, remote
from vericache.config import VeriCacheConfig

DRAFTING = ("lockstep", "staggered")


@dataclass(frozen=True)
class Question:
    """``largest``: bytes of a request's full KV at its end. ``assumed``: the acceptance is not the user's."""

    machine: Machine
    work: Workload
    ratio: float
    drafts: int
    largest: float
    assumed: bool
    remote: Remote | None = None


def report(question: Question) -> dict[str, Any]:
    """Raises ValueError where not one request fits."""
    machine, work, ratio, x = question.machine, question.work, question.ratio, question.drafts
    load, gained = work.load(ratio), work.acceptance.gained(ratio, x)
    found = modes(machine, work, ratio, x)
    base = found["plain"]
    return {
        "hbm_gb": machine.memory / 1e9,
        "hbm_gbps": machine.bandwidth / 1e9,
        "link_gbps": machine.link / 1e9,
        "rho": machine.rho,
        "weights_gb": load.weights / 1e9,
        "kv_gb": load.full / 1e9,
        "ratio": ratio,
        "c": load.c,
        "draft_length": x,
        "acceptance": (gained - 1) / x,
        "acceptance_assumed": question.assumed,
        "tokens_per_cycle": gained,
        "link_limit_tokens_per_cycle": model.link_limit(machine, load),
        **_staggered(question, found.get("staggered"), base),
        "modes": {name: _mode(p, base, name, question.largest) for name, p in found.items()},
        "auto": _auto(question, base),
        "recommended": _choice(recommend(machine, work), base, question),
        **({} if question.remote is None else {"remote": _remote(question, question.remote)}),
    }


def _staggered(question: Question, found: Prediction | None, base: Prediction) -> dict[str, Any]:
    """The terms of equation 3, with as many rows as staggered drafting has."""
    if found is None:
        return dict.fromkeys(
            ("batch", "t_gpu_ms", "t_xfer_ms", "limit", "c_star", "least_draft_length", "break_even_acceptance")
        )
    machine, load, x = question.machine, question.work.load(question.ratio), question.drafts
    return {
        "batch": found.rows,
        "t_gpu_ms": 1e3 * found.gpu,
        "t_xfer_ms": 1e3 * found.transfer,
        "limit": "link" if found.transfer > found.gpu else "memory",
        "c_star": model.balance(machine, load, x, found.rows),
        "least_draft_length": model.least_drafts(machine, load, found.rows),
        "break_even_acceptance": (model.break_even(found, x, base.tokens_per_s) - 1) / x,
    }


def _auto(question: Question, base: Prediction) -> dict[str, Any]:
    """Mode auto under load, with the arena that an engine would choose; none where it should be off."""
    machine, work, ratio, x = question.machine, question.work, question.ratio, question.drafts
    share = auto_share(machine, work, ratio, x)
    found = (elastic(machine, work, ratio, x, share.fraction) if share.fraction else None) or base
    return {
        "arena_fraction": share.fraction,
        "worst_speedup": share.worst,
        "rows": found.rows,
        "tokens_per_s": found.tokens_per_s,
        "speedup": found.tokens_per_s / base.tokens_per_s,
        "settings": {"mode": "auto", "arena_fraction": share.fraction} if share.fraction else {"mode": "off"},
    }


def _mode(prediction: Prediction, base: Prediction, name: str, largest: float) -> dict[str, Any]:
    return {
        "rows": prediction.rows,
        "iteration_ms": 1e3 * prediction.iteration,
        "tokens_per_s": prediction.tokens_per_s,
        "speedup": prediction.tokens_per_s / base.tokens_per_s,
        "link_busy": prediction.link_busy,
        "full_contexts_on_device": prediction.contexts,
        "host_memory_gib": _host_gib(prediction, largest) if name in DRAFTING else 0,
        "exact": name != "short",
    }


def _host_gib(prediction: Prediction, largest: float) -> int:
    """Every drafting request has its full KV in host memory."""
    return math.ceil(prediction.rows * largest / 2**30)


def _choice(choice: Choice, base: Prediction, question: Question) -> dict[str, Any]:
    """And the settings that differ from the defaults."""
    row = _mode(choice.prediction, base, choice.mode, question.largest)
    found: dict[str, Any] = {
        "mode": choice.mode,
        "c": None,
        "ratio": choice.ratio,
        "draft_length": choice.drafts,
        **row,
    }
    if choice.ratio is None or choice.drafts is None:
        return {**found, "settings": {"mode": "off"}}
    load = question.work.load(choice.ratio)
    share = choice.prediction.rows * load.kept / (question.machine.memory - load.weights)
    wanted = {
        "mode": "draft",
        "ratio": choice.ratio,
        "draft_length": choice.drafts,
        "arena_fraction": min(0.99, math.ceil(100 * share) / 100),
        "host_memory_gib": float(row["host_memory_gib"]),
    }
    usual = {name: field.default for name, field in VeriCacheConfig.model_fields.items()}
    settings = {name: value for name, value in wanted.items() if value != usual[name]}
    return {**found, "c": load.c, "settings": settings}


def _remote(question: Question, where: Remote) -> dict[str, Any]:
    machine, load, x = question.machine, question.work.load(question.ratio), question.drafts
    rows = question.work.rows(model.room_short(machine, load))
    full_rows = question.work.rows(model.room_plain(machine, load))
    rounds = Rounds(x, question.work.acceptance.gained(question.ratio, x))
    found = remote(machine, load, rounds, where, rows, full_rows)
    share = found.gpus / (1 + found.gpus)  # of all GPUs: those that draft
    return {
        "start_s": found.start,
        "cycle_ms": 1e3 * found.cycle,
        "verify_ms": 1e3 * found.verify,
        "remote_gpus_per_local": found.gpus,
        "drafting": _service(rows, found.request, share),
        "full_kv": _service(full_rows, found.full_request, 1.0),
    }


def _service(rows: int, seconds: float, share: float) -> dict[str, Any]:
    """``rows`` requests at a time on ``share`` of the GPUs."""
    return {"rows": rows, "request_s": seconds, "requests_per_s_per_gpu": share * rows / seconds}
