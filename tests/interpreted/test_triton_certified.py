"""The kernels of certified decode against the reference in torch: the same decisions, the same sums."""

import pytest
import torch

from tests.interpreted.certified_world import DEVICE, CertifiedWorld
from vericache.certified.attention import Outcome, Policy
from vericache.certified.certificate import Target
from vericache.certified.device import DeviceOutcome, attend, limits_of, true_errors
from vericache.certified.triton_rows import held_logits, sketch_logits

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's dot misreads bfloat16


def same(got: DeviceOutcome, wanted: Outcome, tolerance: float = 2e-5) -> None:
    assert got.fetched.tolist() == wanted.fetched.tolist()
    assert got.fallback.bool().tolist() == wanted.fallback.tolist()
    torch.testing.assert_close(got.error, wanted.error, rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(got.output, wanted.output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("tokens", [31, 32, 70])
def test_logits_of_a_sketch(dim: int, tokens: int) -> None:
    world = CertifiedWorld(dim=dim, tokens=tokens, sizes=(9.0, 12.0), group=3)
    sketch_logits(world.query, world.sketch, world.scale, world.work)
    logits, sigma = world.sketch.logits(world.query, world.scale)
    torch.testing.assert_close(world.work.estimated[..., :tokens], logits, rtol=1e-5, atol=1e-5)
    of_tokens = world.work.sigma.repeat_interleave(32, -1)[..., :tokens]
    torch.testing.assert_close(of_tokens, sigma, rtol=1e-5, atol=1e-6)
    assert world.work.estimated[..., tokens:].isnan().all(), "nothing is written behind the context"


@pytest.mark.parametrize("tail", [1, 16, 17])
def test_logits_of_what_a_slot_holds(tail: int) -> None:
    world = CertifiedWorld(tail=tail, sizes=(7.0, 16.0, 60.0))
    held_logits(world.query, world.sampled.held, world.tokens, world.scale, world.work)
    exact = world.query @ torch.cat([world.keys, world.tail_keys], 1).mT * world.scale
    seen = torch.nn.functional.pad(world.resident, (0, tail), value=True)[:, None].expand_as(exact)
    found = world.work.exact[..., : world.tokens + tail]
    torch.testing.assert_close(found[seen], exact[seen], rtol=1e-5, atol=1e-5)
    assert found[~seen].isnan().all()


@pytest.mark.parametrize(("eps", "z"), [(0.02, 1.0), (0.1, 0.0), (0.1, 1.0), (0.4, 1.0)])
def test_decisions_are_the_references(eps: float, z: float) -> None:
    world = CertifiedWorld(seed=int(eps * 100))
    policy = Policy(Target(eps, 0.1), z, max_fetch=1.0)
    got = world.on_device(policy)
    same(got, world.reference(policy))
    assert got.fetched.any()
    assert (got.error <= eps).all()


@pytest.mark.parametrize(("seed", "eps"), [(0, 0.1), (1, 0.4), (2, 1e-9)])
def test_the_true_error_of_the_denominator(seed: int, eps: float) -> None:
    """Is that of the reference's estimate, and none where everything was read."""
    world, policy = CertifiedWorld(seed=seed, shuffled=seed == 1), Policy(Target(eps, 0.1))
    whole = world.on_device(policy).fallback.all()
    found = true_errors(world.query, world.sampled, world.scale, limits_of(policy, DEVICE), world.work)
    keys = torch.cat([world.keys, world.tail_keys], 1)
    exact = (world.query.double() @ keys.double().mT * world.scale).logsumexp(-1)
    wanted = (world.reference(policy).log_total - exact).expm1().abs().amax(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-6)
    assert (found.max() < 2e-6) if whole else (found.max() > 1e-4)


@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 1, 8), (2, 4, 32), (3, 3, 64), (2, 1, 128)])
def test_shapes(heads: int, group: int, dim: int) -> None:
    world = CertifiedWorld(sizes=(12.0, 30.0, 9.0)[:heads], group=group, dim=dim, tokens=75, seed=heads)
    policy = Policy(Target(0.1))
    same(world.on_device(policy), world.reference(policy))


@pytest.mark.parametrize("seed", range(2))
def test_a_head_that_asks_for_too_much_reads_everything(seed: int) -> None:
    world = CertifiedWorld(seed=seed)
    policy = Policy(Target(0.05), max_fetch=0.25)
    got = world.on_device(policy)
    same(got, world.reference(policy))
    whole = got.fallback.bool()
    assert whole.any()
    absent = (~world.resident).sum(-1)
    assert (got.fetched[whole] == absent[whole]).all()
    assert (got.error[whole] == 0).all()
    torch.testing.assert_close(got.output[whole], world.dense[whole], rtol=1e-5, atol=1e-5)


def test_without_an_error_it_is_dense_attention() -> None:
    world = CertifiedWorld()
    got = world.on_device(Policy(Target(1e-9)))
    assert got.fallback.all()
    torch.testing.assert_close(got.output, world.dense, rtol=1e-5, atol=1e-5)


def test_nothing_is_fetched_where_the_sample_is_enough() -> None:
    """Nothing on the host is read: what its pages hold does not matter."""
    world = CertifiedWorld(sizes=(80.0, 90.0), spread=0.2)
    world.host.images.fill_(float("nan"))
    policy = Policy(Target(0.9))
    got = world.on_device(policy)
    assert not got.fetched.any()
    same(got, world.reference(policy))


def test_a_context_that_is_all_at_hand() -> None:
    world = CertifiedWorld(sizes=(110.0, 110.0))
    got = world.on_device(Policy(Target(0.01)))
    assert not got.fetched.any()
    assert (got.error == 0).all()
    torch.testing.assert_close(got.output, world.dense, rtol=1e-5, atol=1e-5)


def test_pages_in_the_order_of_another_backend() -> None:
    world = CertifiedWorld(shuffled=True)
    policy = Policy(Target(0.1))
    got = world.on_device(policy)
    assert got.fetched.any()
    same(got, world.reference(policy))


def test_half_precision() -> None:
    world = CertifiedWorld(dtype=HALF)
    policy = Policy(Target(0.1))
    same(world.on_device(policy), world.reference(policy), 1e-3)


def test_one_workspace_serves_rows_one_after_the_other() -> None:
    """Whatever another row has left in it."""
    policy, other = Policy(Target(0.1)), CertifiedWorld(seed=5, tokens=140, tail=9)
    world = CertifiedWorld(seed=6)
    alone = world.on_device(policy)
    del world.work
    world.work = other.work
    other.on_device(policy)
    again = world.on_device(policy)
    assert torch.equal(alone.output, again.output)
    assert torch.equal(alone.fetched, again.fetched)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_replays_other_queries() -> None:
    """Nothing on the way needs the host, though the engine runs certified rows outside graphs."""
    world, policy = CertifiedWorld(), Policy(Target(0.1))
    world.on_device(policy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    limits = limits_of(policy, DEVICE)
    with torch.cuda.graph(graph):
        got = attend(world.query, world.sampled, world.scale, policy.max_fetch, limits, world.work)
    for seed in range(3):
        rng = torch.Generator(DEVICE).manual_seed(seed)
        world.query.copy_(torch.randn(world.query.shape, generator=rng, device=DEVICE) * 2)
        graph.replay()
        same(got, world.reference(policy))
