"""Certified attention against dense attention, over contexts whose heads keep different numbers of tokens."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compressors.poisson import inclusion
from vericache.certified.attention import Fetch, Outcome, Policy, Sampled, certified_attention, padded
from vericache.certified.certificate import Target
from vericache.certified.sketch import sketch_keys

HEADS, GROUP, DIM, TOKENS, TAIL, SCALE = 3, 2, 16, 300, 5, 16**-0.5


@dataclass
class World:
    """A context, a tail, a query, and the reads of the full cache."""

    keys: Tensor
    values: Tensor
    tail: tuple[Tensor, Tensor]
    query: Tensor
    sampled: Sampled
    reads: list[tuple[int, list[int]]]

    @classmethod
    def of(cls, seed: int = 0, draw: int = 0, share: float = 1 / 8) -> "World":
        rng = torch.Generator().manual_seed(seed)
        numbers = [torch.randn(HEADS, n, DIM, generator=rng) for n in (TOKENS, TOKENS, TAIL, TAIL, GROUP)]
        keys, values, tail_keys, tail_values, query = numbers
        query *= 2
        scores = (query.mean(1, keepdim=True) @ keys.mT * SCALE).softmax(-1)[:, 0]
        forced = torch.zeros(TOKENS, dtype=torch.bool)
        forced[:2] = forced[-8:] = True
        sizes = 10 + (TOKENS - 10) * share * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
        r = inclusion(scores.masked_fill(forced, float("inf")), sizes, forced, 1.0, 1e-3)
        z = torch.rand(r.shape, generator=torch.Generator().manual_seed(draw), dtype=torch.float64) < r
        places = padded(z.sum(-1), z.nonzero()[:, 1], TOKENS)
        at = places.clamp(max=TOKENS - 1)[..., None].expand(-1, -1, DIM)
        # What stands where a head has no token must not matter.
        blank = (places == TOKENS)[..., None]
        held = [x.gather(1, at).masked_fill(blank, float("nan")) for x in (keys, values)]
        sampled = Sampled(sketch_keys(keys), r, places, held[0].nan_to_num(1e3), held[1].nan_to_num(1e3))
        return cls(keys, values, (tail_keys, tail_values), query, sampled, [])

    def attend(self, policy: Policy, fetch: bool = True) -> Outcome:
        return certified_attention(self.query, self.sampled, self.tail, SCALE, policy, self._fetch if fetch else None)

    @property
    def _fetch(self) -> Fetch:
        def read(head: int, at: Tensor) -> tuple[Tensor, Tensor]:
            self.reads.append((head, at.tolist()))
            return self.keys[head, at], self.values[head, at]

        return read

    @property
    def logits(self) -> Tensor:
        return self.query @ torch.cat([self.keys, self.tail[0]], 1).mT * SCALE

    @property
    def dense(self) -> Tensor:
        return self.logits.softmax(-1) @ torch.cat([self.values, self.tail[1]], 1)


def test_without_an_error_it_is_dense_attention() -> None:
    world = World.of()
    outcome = world.attend(Policy(Target(0.0), max_fetch=1.0))
    torch.testing.assert_close(outcome.output, world.dense)
    assert (outcome.error == 0).all()
    torch.testing.assert_close(outcome.log_total, world.logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    resident = (world.sampled.positions < TOKENS).sum(-1)
    assert (outcome.fetched == TOKENS - resident).all()


def test_a_decision_that_needs_too_much_reads_everything() -> None:
    world = World.of()
    outcome = world.attend(Policy(Target(1e-6), max_fetch=0.0))
    assert outcome.fallback.all()
    torch.testing.assert_close(outcome.output, world.dense)


def test_only_absent_tokens_are_read_and_each_once() -> None:
    world = World.of()
    outcome = world.attend(Policy(Target(0.02), max_fetch=1.0))
    seen: dict[int, list[int]] = {}
    for head, at in world.reads:
        seen.setdefault(head, []).extend(at)
    for head, positions in seen.items():
        assert len(positions) == len(set(positions)) == outcome.fetched[head]
        assert not set(positions) & set(world.sampled.positions[head].tolist())
    assert (outcome.error <= 0.02).all()


def test_what_is_asked_for_does_not_depend_on_the_sample() -> None:
    """With other draws of the same probabilities, what is fetched and what was at hand are together the same."""
    chosen = []
    for draw in range(3):
        world = World.of(draw=draw)
        outcome = world.attend(Policy(Target(0.05), max_fetch=1.0))
        chosen.append(outcome.error)
    for other in chosen[1:]:
        torch.testing.assert_close(other, chosen[0])


@pytest.mark.parametrize("eps", [0.05, 0.3])
def test_errors_stay_below_epsilon_more_often_than_promised(eps: float) -> None:
    off = []
    for draw in range(24):
        world = World.of(seed=draw % 3, draw=draw)
        outcome = world.attend(Policy(Target(eps, 0.1), z=1.0, max_fetch=1.0))
        off.append((outcome.log_total - world.logits.double().logsumexp(-1)).expm1().abs() > eps)
    assert torch.stack(off).double().mean() < 0.1


def test_alone_it_estimates_from_what_is_resident() -> None:
    errors = []
    for draw in range(12):
        world = World.of(draw=draw)
        outcome = world.attend(Policy(), fetch=False)
        assert not outcome.fetched.any()
        errors.append((outcome.log_total - world.logits.double().logsumexp(-1)).expm1())
    assert torch.stack(errors).abs().mean() < 0.3
    assert torch.stack(errors).std() > 0
    assert not World.of().reads


def test_a_context_that_is_all_at_hand_needs_no_sketch() -> None:
    world = World.of(share=8.0)
    outcome = world.attend(Policy(Target(0.01)))
    torch.testing.assert_close(outcome.output, world.dense)
    assert not outcome.fetched.any()
