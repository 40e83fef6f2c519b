"""What the scheduler makes of reloads that leave kept tokens out: which blocks come whole, what is booked."""

from types import SimpleNamespace
from typing import Any

import pytest

from vericache.engine.host_pages import HostPages
from vericache.engine.ledger import Fence
from vericache.engine.ops import Load
from vericache.engine.prestore import Prestore
from vericache.engine.residual import Residual

BLOCK, BYTES = 4, 100  # tokens and bytes of a block


def world(ratio: float = 0.5) -> tuple[Residual, HostPages]:
    host = HostPages(40)
    plan = SimpleNamespace(block_tokens=BLOCK, block_bytes=BYTES, blocks_for=lambda tokens: -(-tokens // BLOCK))
    return Residual(SimpleNamespace(plan=plan, host=host), ratio), host  # type: ignore[arg-type]


def record(host: HostPages, context: int, filled: int, kept: int, **more: Any) -> Any:
    pages = host.take(-(-context // BLOCK))
    blocks = [SimpleNamespace(block_id=100 + i) for i in range(len(pages or ()))]
    usual = {"request_id": "a", "slot": 3, "here": 0, "context": context, "filled_at": filled, "kept_bytes": kept}
    return SimpleNamespace(**{**usual, "host_pages": pages, "blocks": blocks, **more})


def test_what_is_kept_is_left_out_but_for_pages_that_others_held() -> None:
    residual, host = world()
    one = record(host, 22, 20, 240)
    assert (residual.full(one), residual.saved(one)) == (600, 240)
    load = residual.load(one)
    assert load == Load("a", tuple(one.host_pages), tuple(range(100, 106)), slot=3, first=0, whole=0)
    for page in one.host_pages[:2]:
        host.hold(page)
    assert residual.saved(one) == 240 * 3 // 5  # 8 of 20 tokens come whole
    one.here = 1
    load = residual.load(one)
    assert (load.pages, load.blocks, load.first, load.whole) == (
        tuple(one.host_pages[1:]),
        tuple(range(101, 106)),
        1,
        1,
    )
    host.release(host.let_go(one.host_pages[:2]))  # the other one leaves, the bytes stay its own
    assert residual.load(one).whole == 1


def test_a_page_that_is_given_to_the_next_request_is_its_own() -> None:
    _, host = world()
    (page,) = host.take(1) or [-1]
    host.hold(page)
    assert host.mixed([page]) == 1
    assert not host.let_go([page])
    host.release(host.let_go([page]))
    assert host.mixed([page]) == 0


def test_a_record_without_kept_tokens_reloads_all() -> None:
    residual, host = world(0.0)
    one = record(host, 10, 10, 0)
    assert not residual.on
    assert residual.saved(one) == 0
    assert residual.load(one).slot is None


def test_the_share_that_crosses_the_link() -> None:
    residual, host = world(0.25)
    assert residual.crossing == 0.75  # nobody drafts yet
    residual.review([record(host, 8, 8, 150), record(host, 16, 16, 150), record(host, 24, 0, 0)])
    assert residual.crossing == 0.5
    residual.review([])
    assert residual.crossing == 0.75


@pytest.mark.parametrize("computed", [16, 5, 0])
def test_a_prompt_that_starts_anew_leaves_pages_of_the_first_time(computed: int) -> None:
    """Blocks that are found in the host under their own page are not copied again, but the arena will hold what the
    second time computed."""
    _, host = world()
    request = SimpleNamespace(request_id="a", num_prompt_tokens=20, num_tokens=20, num_computed_tokens=12)
    plan = SimpleNamespace(block_tokens=BLOCK, blocks_for=lambda tokens: -(-tokens // BLOCK))
    reserved = SimpleNamespace(
        plan=plan, host=host, fence=Fence(), pages_beside=lambda *_: 6, hold_prompt=lambda _: [],
        missing=lambda *_: True, blocks=SimpleNamespace(of_request=lambda _: list(range(6))),
    )  # fmt: skip
    ahead = Prestore(reserved)  # type: ignore[arg-type]
    ahead.step([request], lambda _: True, 4, 0, 9)  # type: ignore[list-item]
    assert host.mixed(ahead.pages("a")) == 0
    request.num_computed_tokens = computed
    ahead.step([request], lambda _: True, 4, 0, 9)  # type: ignore[list-item]
    assert host.mixed(ahead.pages("a")) == (0 if computed > 12 else 3)
