"""Turning keys to positions and back, against the rotation written out with complex numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressors import MethodError, MethodSpec, Rotary, Shape, create
from compressors.streaming_llm import StreamingLLM
from tests.tensor.compressor_runs import SHAPE, rotary

POSITIONS = torch.tensor([0, 5, 63, 5, 17])


def as_complex(x: Tensor, rot: int, neox: bool) -> Tensor:
    """The pairs of the first ``rot`` dimensions as complex numbers."""
    order = torch.arange(rot).view(2, -1).T if neox else torch.arange(rot).view(-1, 2)
    return torch.view_as_complex(x[..., order].contiguous())


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rot", [8, 4])
def test_turning_multiplies_pairs_by_a_unit_number(rot: int, neox: bool) -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    turned = rotary(rot, neox).turn(x, POSITIONS)
    angle = POSITIONS[:, None] * 10000 ** (-torch.arange(0, rot, 2) / rot)
    wanted = as_complex(x, rot, neox) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(as_complex(turned, rot, neox), wanted)
    assert torch.equal(turned[..., rot:], x[..., rot:]), "dimensions behind rot do not turn"
    assert torch.equal(turned[:, 0], x[:, 0]), "position 0 turns nothing"


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rot", [8, 4])
@pytest.mark.parametrize(("factor", "dtype"), [(1.0, torch.float32), (1.3, torch.float32), (1.0, torch.bfloat16)])
def test_back_is_the_inverse(rot: int, neox: bool, factor: float, dtype: torch.dtype) -> None:
    """Also of YaRN's attention factor and of a table that the model rounds."""
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1))
    rope = Rotary((factor * rotary(rot, neox).cos_sin).to(dtype), neox)
    turned = rope.turn(x, POSITIONS)
    assert turned.dtype == torch.float32
    torch.testing.assert_close(rope.back(turned, POSITIONS), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rope.turn(rope.back(x, POSITIONS), POSITIONS), x, rtol=1e-5, atol=1e-5)


def test_dot_products_depend_on_the_distance_only() -> None:
    rope, (q, k) = rotary(8, True), torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(2))
    near = (rope.turn(q, torch.tensor([9])) * rope.turn(k, torch.tensor([4]))).sum()
    far = (rope.turn(q, torch.tensor([60])) * rope.turn(k, torch.tensor([55]))).sum()
    torch.testing.assert_close(near, far)


@pytest.mark.parametrize("position", [-1, 64])
def test_positions_outside_the_table_are_an_error(position: int) -> None:
    """On a GPU the index itself would end the process."""
    with pytest.raises(MethodError, match=r"the model's rotary embedding has 0 \.\. 63"):
        rotary(8, positions=64).turn(torch.zeros(1, 8), torch.tensor([position]))


def test_no_positions() -> None:
    assert rotary(8, False).back(torch.zeros(2, 0, 8), torch.arange(0)).shape == (2, 0, 8)


def test_shapes_are_compared_without_it() -> None:
    assert Shape(3, 2, 6, 16, rotary(16, positions=64)) == SHAPE
    assert hash(Shape(3, 2, 6, 16, rotary(16, positions=64))) == hash(SHAPE)


def test_a_method_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingLLM, "needs_rotary", True)
    with pytest.raises(MethodError, match="this model has no single rotary embedding"):
        create(MethodSpec("streaming_llm"), replace(SHAPE, rotary=None), 50)
    create(MethodSpec("streaming_llm"), Shape(3, 2, 6, 16, rotary(16, True)), 50)
