"""Page formats against their oracles, and what packing alone promises."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packings import kivi, rotatekv, turboquant
from vericache.draft.formats import FORMATS, TurboQuant, hadamard, pack, page_format, rotation, unpack
from vericache.errors import CompressionError, ConfigError

ORACLES = {"turboquant": turboquant, "kivi": kivi, "rotatekv": rotatekv}


def tokens(pages: int, page_tokens: int, dim: int, seed: int) -> torch.Tensor:
    """Some channels are large, as in keys, and one token is zero."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(pages, page_tokens, dim, generator=rng) + 5 * torch.randn(dim, generator=rng)
    x[0, 1] = 0
    return x


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("page_tokens", "dim"), [(32, 64), (64, 32), (32, 128), (32, 96), (96, 32)])
def test_decoded_pages_are_the_oracles(name: str, page_tokens: int, dim: int) -> None:
    """Also of pages that are not full: what lies behind their tokens has no part in it."""
    keys, values = tokens(4, page_tokens, dim, 1), tokens(4, page_tokens, dim, 2)
    counts = torch.tensor([page_tokens, 1, page_tokens - 1, 9])
    form = page_format(name, page_tokens, dim, torch.float32)
    pages = form.encode(keys, values, counts)
    assert pages.shape == (4, form.page_bytes)
    assert pages.dtype == torch.uint8
    decoded = [form.back(x) for x in form.decode(pages)]
    oracle = ORACLES[name[:-1]](form.bits, page_tokens, 0) if form.packed else None
    for page, count in enumerate(counts.tolist()):
        wanted = keys[page, :count], values[page, :count]
        if oracle is not None:
            wanted = oracle.lose(*wanted)
        for x, y in zip(decoded, wanted, strict=True):
            assert_mostly_close(x[page, :count], y)


def assert_mostly_close(x: torch.Tensor, y: torch.Tensor) -> None:
    """Of one token in fifty, a number may lie so close to the middle between two codes, or its range to that of two
    float16 numbers, that the last bit of a product decides."""
    wrong = ~torch.isclose(x, y, rtol=1e-4, atol=1e-4).all(-1)
    assert wrong.sum() <= len(wrong) / 50


@pytest.mark.parametrize(("name", "bits"), [("turboquant4", 4.25), ("turboquant3", 3.25), ("turboquant2", 2.25),
                                            ("kivi4", 5.0), ("kivi2", 3.0), ("rotatekv4", 4.5), ("rotatekv2", 2.5),
                                            ("plain", 16.0)])  # fmt: skip
def test_bits_of_an_element(name: str, bits: float) -> None:
    form = page_format(name, 32, 64, torch.bfloat16)
    assert form.page_bytes * 8 / (2 * 32 * 64) == bits


@pytest.mark.parametrize(("bits", "error"), [(4, 0.01154), (3, 0.03744), (2, 0.1188)])
def test_the_error_of_turboquant_is_that_of_the_levels(bits: int, error: float) -> None:
    """Of a normal distribution, which a rotation makes of anything; uniform levels, see Max 1960."""
    x = torch.randn(64, 32, 128, generator=torch.Generator().manual_seed(bits))
    form = TurboQuant(bits, 32, 128, torch.float32)
    keys, _ = form.decode(form.encode(x, x, torch.full((64,), 32)))
    assert abs(float((form.back(keys) - x).square().mean() / x.square().mean()) / error - 1) < 0.06


@pytest.mark.parametrize("name", ["rotatekv4", "rotatekv2"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_a_token_is_packed_alone(name: str, dim: int) -> None:
    """Pages appended one at a time, and any tokens beside it, make the same bytes; a page is not read beyond its
    tokens."""
    keys, values = tokens(3, 32, dim, 5), tokens(3, 32, dim, 6)
    form, counts = page_format(name, 32, dim, torch.float32), torch.tensor([32, 32, 7])
    pages = form.encode(keys, values, counts)
    assert torch.equal(
        pages, torch.cat([form.encode(*(x[i : i + 1] for x in (keys, values, counts))) for i in range(3)])
    )
    keys[2, 7:], values[2, 7:] = float("nan"), float("inf")
    decoded = [x[2, :7] for x in form.decode(pages)]
    again = [x[2, :7] for x in form.decode(form.encode(keys, values, counts))]
    assert all(map(torch.equal, decoded, again))


@pytest.mark.parametrize("name", ["rotatekv4", "rotatekv2"])
@pytest.mark.parametrize("number", [0.0, 0.1, -3e3, 1e-9])
def test_constant_tokens(name: str, number: float) -> None:
    """All but one number of a turned token are 0 then; of a token of nothing, all."""
    x = torch.full((1, 32, 64), number)
    form = page_format(name, 32, 64, torch.float32)
    keys, values = (form.back(y) for y in form.decode(form.encode(x, x, torch.tensor([32]))))
    torch.testing.assert_close(keys, x, rtol=2e-3, atol=1e-6)
    assert torch.equal(keys, values)


@pytest.mark.parametrize("name", ["rotatekv4", "rotatekv2"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(name: str, number: float) -> None:
    keys, values = tokens(2, 32, 64, 7), tokens(2, 32, 64, 8)
    values[1, 3, 5] = number
    form = page_format(name, 32, 64, torch.float32)
    with pytest.raises(CompressionError, match="1 of 64 tokens"):
        form.encode(keys, values, torch.tensor([32, 32]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4]), st.integers(1, 3), st.sampled_from([2, 6, 32]), st.sampled_from([8, 24, 64]))
def test_packing_is_reversible(bits: int, pages: int, page_tokens: int, dim: int) -> None:
    rng = torch.Generator().manual_seed(dim)
    codes = torch.randint(0, 2**bits, (pages, page_tokens, dim), generator=rng).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (pages, page_tokens * dim * bits // 8)
    assert torch.equal(unpack(packed, bits, page_tokens), codes)


@pytest.mark.parametrize("make", [rotation, hadamard])
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128])
def test_a_rotation_keeps_lengths(make: Callable[[int], torch.Tensor], dim: int) -> None:
    torch.testing.assert_close(make(dim) @ make(dim).T, torch.eye(dim), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "page_tokens"), [(n, t) for n in FORMATS for t in (24, 32, 128) if t % 32 == 0 or not n.startswith("kivi")]
)
def test_tails_fit_into_pages(name: str, page_tokens: int, dtype: torch.dtype) -> None:
    form = page_format(name, page_tokens, 64, dtype)
    assert 1 <= form.tail_page_tokens <= page_tokens
    assert page_tokens % form.tail_page_tokens == 0
    assert form.tail_page_tokens * 2 * 64 * dtype.itemsize <= form.page_bytes
    assert form.page_bytes % 16 == 0


@pytest.mark.parametrize(
    ("name", "page_tokens", "dim", "why"),
    [("kivi4", 16, 64, "page_tokens to a multiple of 32"), ("kivi2", 32, 80, "head size 80"),
     ("turboquant3", 32, 44, "multiples of 8"), ("turboquant2", 22, 64, "page_tokens 22")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(name: str, page_tokens: int, dim: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        page_format(name, page_tokens, dim, torch.float32)
