"""Certified rows on the V2 runner: with almost no error allowed they give the tokens of plain rows, beside rows of all
other kinds; with some, they decide what the reference on the CPU decides."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.interpreted.engine.v2_engine import SLOW, V2Engine, params
from vericache.certified.attention import Outcome, Sampled, certified_attention, padded
from vericache.draft.step import CertifiedToken
from vericache.engine.certified_device import CertifiedDevice, DeviceSlot
from vericache.errors import RequestError

SETTINGS: dict[str, Any] = {
    "compressor": "snapkv",
    "compressor_options": {"window": 8, "kernel": 3},
    "ratio": 0.4,
    "tail_tokens": 40,
    "request_options": ("mode", "epsilon", "delta"),
}
EXACT = not torch.cuda.is_available()


def asking(epsilon: float, length: int) -> SamplingParams:
    extra = {"vericache_mode": "certified", "vericache_epsilon": epsilon}
    return params(1, length, extra_args=extra)[0]


@pytest.fixture(autouse=True)
def half_of_it_is_measured(engine: V2Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.worker.certified, "measured", 0.5)  # read when an engine starts


@pytest.mark.parametrize("draft_length", [pytest.param(3, marks=SLOW)])
def test_as_epsilon_goes_to_0_the_tokens_are_plain_rows(engine: V2Engine, draft_length: int) -> None:
    """Beside a request that drafts and one that stays resident; a full tail is computed anew and sampled again."""
    engine.configure(**SETTINGS | {"window": 6, "tail_tokens": 1, "draft_length": draft_length})
    prompts = [engine.prompt(60, 1), engine.prompt(70, 2), engine.prompt(75, 3)]
    length = 10
    off = params(1, length, extra_args={"vericache_mode": "off"})[0]
    outputs = engine.generate(prompts, [asking(1e-9, length), *params(1, length), off])
    if EXACT:
        assert tokens(outputs) == engine.plain(prompts, params(3, length))
    found = summaries(outputs)
    assert [s["mode"] for s in found] == ["certified", "draft", "resident"]
    assert found[0]["recoveries"] == 0
    decided = found[0]["certified"]
    assert decided["tokens"] == length - 2, "the prompt's token, and that of the prompt computed anew"
    shape = engine.worker.arena.shape
    assert decided["decisions"] == decided["tokens"] * shape.layers * shape.kv_heads
    assert decided["fetched_bytes"] == decided["fetched_tokens"] * engine.worker.certified.token_bytes > 0
    assert decided["largest_certificate"] <= 1e-9
    assert decided["largest_measured_error"] < 1e-4
    engine.at_rest()
    assert not engine.worker.certified.bytes_held


@pytest.mark.parametrize("server", [{}, {"bound": "output"}])
def test_a_certified_output_is_refused(engine: V2Engine, server: dict[str, Any]) -> None:
    """At the door and in the engine; the kernels know the denominator alone."""
    engine.configure(**SETTINGS | {"request_options": ("mode", "bound", "epsilon")} | server)
    asked = {"vericache_mode": "certified"} | ({} if server else {"vericache_bound": "output"})
    one = params(1, 2, extra_args=asked)[0]
    with pytest.raises(RequestError, match="denominator, not the output"):
        engine.generate([engine.prompt(60, 1)], [one])
    request = Mock(request_id="x", sampling_params=one)
    reason = engine.coordinator.terms.resident_reason(request)
    engine.coordinator.terms.forget("x")
    assert reason is not None
    assert reason.code == "bad_option"
    engine.at_rest()


class Reference:
    """What the reference in torch decides where the kernels do, from the same slot and the same host pages."""

    def __init__(self, rows: CertifiedDevice) -> None:
        self._rows, self.fetched, self.whole, self.off = rows, 0, 0, 0.0
        self.attend: Callable[..., Tensor] = rows.attend

    def __call__(self, asked: CertifiedToken, layer: int, query: Tensor, scale: float) -> Tensor:
        output = self.attend(asked, layer, query, scale)
        wanted = self._decide(self._rows._slots[asked.slot], asked, layer, query, scale)
        self.fetched += int(wanted.fetched.sum())
        self.whole += int((wanted.fallback & (wanted.fetched > 0)).sum())
        self.off = max(self.off, float((output - wanted.output.flatten(0, 1)).abs().max()))
        return output

    def _decide(self, slot: DeviceSlot, asked: CertifiedToken, layer: int, query: Tensor, scale: float) -> Outcome:
        keys, values, *tail = self._rows.arena.tokens(asked.slot, layer, asked.tail)
        resident, tokens = slot.resident[layer].bool(), slot.inclusion.shape[-1]
        places = padded(resident.sum(-1), resident.nonzero()[:, 1], tokens)
        sampled = Sampled(slot.sketches[layer], slot.inclusion[layer].double(), places, keys, values)
        grouped = query.unflatten(0, (len(keys), -1))
        layout, images = self._rows.layout, self._rows._images[:, layer]

        def read(head: int, at: Tensor) -> tuple[Tensor, Tensor]:
            k, v = layout.read(images[:, head : head + 1], slot.pages.cpu().long(), at.cpu())
            return k[0].to(at.device), v[0].to(at.device)

        policy = replace(asked.policy, shortlist=10_000)
        return certified_attention(grouped, sampled, (tail[0], tail[1]), scale, policy, read)


def test_decisions_are_the_references(engine: V2Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(engine.worker.certified)
    monkeypatch.setattr(engine.worker.certified, "attend", reference)
    engine.configure(**SETTINGS)
    (output,) = engine.generate([engine.prompt(100, 4)], [asking(0.1, 6)])
    (summary,) = summaries([output])
    found = summary["certified"]
    assert found["tokens"] == 5
    assert found["fetched_tokens"] == reference.fetched > 0
    assert found["fallbacks"] == reference.whole
    assert found["largest_certificate"] <= 0.1
    assert reference.off < (1e-4 if EXACT else 2e-2)
    engine.at_rest()
