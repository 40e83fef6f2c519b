"""Key sketches: their logits against exact ones, that sigma is what they are off by, and the bytes they take."""

import math

import pytest
import torch
from torch import Tensor

from compressors.poisson import inclusion
from vericache.certified.certificate import Target, Weights
from vericache.certified.fetch import plan_fetch
from vericache.certified.sketch import SKETCHES, PerChannel, Rotated, sketch_keys
from vericache.draft.formats import page_format
from vericache.errors import CompressionError, ConfigError

SCALE = 0.125


def keys_of(heads: int = 2, n: int = 96, dim: int = 64, seed: int = 0) -> Tensor:
    """Some channels are large, as in keys."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(heads, n, dim, generator=rng) + 2 * torch.randn(heads, 1, dim, generator=rng)


def queries_of(heads: int = 2, group: int = 3, dim: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(heads, group, dim, generator=torch.Generator().manual_seed(seed)) * 2


def exact(queries: Tensor, keys: Tensor) -> Tensor:
    return queries @ keys.mT * SCALE


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 96])
@pytest.mark.parametrize("dim", [8, 80, 128])
def test_shapes_of_any_number_of_tokens(name: str, n: int, dim: int) -> None:
    logits, sigma = sketch_keys(keys_of(2, n, dim), name).logits(queries_of(2, 3, dim), SCALE)
    assert logits.shape == sigma.shape == (2, 3, n)
    assert logits.isfinite().all()
    assert (sigma >= 0).all()


@pytest.mark.parametrize("name", SKETCHES)
def test_sigma_is_what_logits_are_off_by(name: str) -> None:
    """In a head's units: of many queries, the share of errors within one, two and three sigma is about normal."""
    keys, queries = keys_of(4, 256), queries_of(4, 200)
    logits, sigma = sketch_keys(keys, name).logits(queries, SCALE)
    off = (logits - exact(queries, keys)) / sigma
    assert float(off.square().mean().sqrt()) == pytest.approx(1, abs=0.1)
    assert float((off.abs() < 1).float().mean()) == pytest.approx(0.683, abs=0.05)
    assert float((off.abs() < 3).float().mean()) > 0.99


def test_more_bits_are_more_exact() -> None:
    keys, queries = keys_of(), queries_of()
    errors = [
        float((Rotated.of(keys, bits).logits(queries, SCALE)[0] - exact(queries, keys)).square().mean())
        for bits in (1, 2, 4)
    ]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_rotated_codes_have_no_bias_along_a_key(bits: int) -> None:
    """A query that points along a key has its exact logit; rounded numbers alone would be too small by their share."""
    keys = keys_of(1, 64)
    logits, _ = Rotated.of(keys, bits).logits(keys, 1.0)
    torch.testing.assert_close(logits.diagonal(dim1=1, dim2=2), keys.square().sum(-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_residuals_are_what_the_codes_leave_out(bits: int) -> None:
    """``|k - k^|^2 = |k|^2 (e / (1 - e))``, with e the error of the levels: 0.363, 0.119, 0.0115 (Max, 1960)."""
    keys = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0))
    residual = Rotated.of(keys, bits).residuals.float().square() / keys.square().sum(-1)
    error = {1: 0.3634, 2: 0.1188, 4: 0.01154}[bits]
    assert float(residual.mean()) == pytest.approx(error / (1 - error), rel=0.08)


def test_one_bit_is_the_sign() -> None:
    sketch = Rotated.of(keys_of(1, 8, 16), 1)
    assert sketch.codes.shape == (1, 8 * 2)
    flipped = Rotated.of(-keys_of(1, 8, 16), 1)
    assert torch.equal(flipped.codes, ~sketch.codes)
    assert torch.equal(flipped.scales, sketch.scales)


def test_per_channel_codes_are_those_of_a_kivi_page() -> None:
    keys = keys_of(2, 64)
    form = page_format("kivi2", 32, 64, torch.float32)
    pages = form.encode(*(keys.unflatten(1, (2, 32)).flatten(0, 1),) * 2, torch.full((4,), 32))
    decoded = form.decode(pages)[0].unflatten(0, (2, 2)).flatten(1, 2)
    logits, _ = PerChannel.of(keys).logits(queries_of(), SCALE)
    torch.testing.assert_close(logits, exact(queries_of(), decoded))


@pytest.mark.parametrize("n", [5, 33])
def test_a_group_that_is_not_full_has_the_range_of_its_own_tokens(n: int) -> None:
    """Two tokens of a group are its range's ends, and so are exact."""
    keys = keys_of(1, n)
    last = keys[:, n // 32 * 32 :]
    ends = torch.cat([last, last[:, :1]], 1)[:, :2] if last.shape[1] < 2 else last[:, :2]
    sketch = PerChannel.of(torch.cat([keys[:, : n // 32 * 32], ends], 1))
    queries = queries_of(1)
    logits, _ = sketch.logits(queries, SCALE)
    torch.testing.assert_close(logits[..., -2:], exact(queries, ends), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "dim", "token_bytes"), [("per_channel2", 128, 48), ("per_channel2", 64, 24),
                                                          ("rotated2", 128, 36), ("rotated2", 64, 20),
                                                          ("sign", 128, 20), ("sign", 64, 12)])  # fmt: skip
def test_bytes_of_a_token(name: str, dim: int, token_bytes: int) -> None:
    """Of 512 and 256 of keys and values in 16 bits: 9.4 % of the cache, 7 or 7.8 %, 3.9 or 4.7 %."""
    sketch = sketch_keys(keys_of(2, 64, dim), name)
    assert sketch.token_bytes == token_bytes
    assert sketch.nbytes == token_bytes * 2 * 64


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize("value", [0.0, 1e-9, 3e4])
def test_keys_that_are_all_alike(name: str, value: float) -> None:
    """Also below what float16 can tell from 0."""
    keys, queries = torch.full((1, 40, 16), value), queries_of(1, 2, 16)
    logits, sigma = sketch_keys(keys, name).logits(queries, SCALE)
    assert logits.isfinite().all()
    assert sigma.isfinite().all()
    assert (
        (logits - exact(queries, keys)).abs() <= 4 * sigma + queries.abs().sum(-1, keepdim=True) * (1e-3 * value + 1e-8)
    ).all()


@pytest.mark.parametrize("name", SKETCHES)
def test_a_sketch_of_16_bit_keys_is_that_of_the_same_numbers(name: str) -> None:
    keys = keys_of().bfloat16()
    for x, y in zip(*(sketch_keys(k, name).logits(queries_of(), SCALE) for k in (keys, keys.float())), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", SKETCHES)
def test_a_decision_from_keys_to_what_is_fetched(name: str) -> None:
    """Forms fit together: keys ``[H, n, D]``, queries ``[H, G, D]``, probabilities ``[H, 1, n]``."""
    keys, queries = keys_of(2, 128), queries_of()
    forced = torch.arange(128) < 4
    r = inclusion(torch.rand(2, 128), torch.full((2,), 20.0).double(), forced, 1.0, 1e-3)[:, None]
    logits, sigma = sketch_keys(keys, name).logits(queries, SCALE)
    mixed = torch.where(r == 1, exact(queries, keys), logits)
    plain, wide = (plan_fetch(Weights.of(mixed, r, sigma, z), r, Target()) for z in (0.0, 1.0))
    assert plain.chosen.shape == (2, 3, 128)
    assert (plain.error <= 0.05).all()
    assert (wide.count >= plain.count).all()


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_keys_that_are_not_finite(name: str, value: float) -> None:
    keys = keys_of(2, 8)
    keys[1, 3, 5] = value
    with pytest.raises(CompressionError, match="1 of 16 keys are not finite"):
        sketch_keys(keys, name)


def test_sketches_that_are_none() -> None:
    with pytest.raises(ConfigError, match="key sketch 'pq' is unknown, expected one of per_channel2, rotated2, sign"):
        sketch_keys(keys_of(), "pq")
    with pytest.raises(ConfigError, match="multiple of 8, got head size 20"):
        sketch_keys(keys_of(1, 8, 20))
