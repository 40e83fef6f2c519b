"""Page formats against their oracles, and what packing alone promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packings import kivi, turboquant
from vericache.draft.formats import FORMATS, TurboQuant, pack, page_format, rotation, unpack
from vericache.errors import ConfigError

PACKED = [name for name in FORMATS if name != "plain"]


def tokens(pages: int, page_tokens: int, dim: int, seed: int) -> torch.Tensor:
    """Some channels are large, as in keys, and one token is zero."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(pages, page_tokens, dim, generator=rng) + 5 * torch.randn(dim, generator=rng)
    x[0, 1] = 0
    return x


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("page_tokens", "dim"), [(32, 64), (64, 32), (32, 128)])
def test_decoded_pages_are_the_oracles(name: str, page_tokens: int, dim: int) -> None:
    """Also of pages that are not full: what lies behind their tokens has no part in it."""
    keys, values = tokens(4, page_tokens, dim, 1), tokens(4, page_tokens, dim, 2)
    counts = torch.tensor([page_tokens, 1, page_tokens - 1, 9])
    form = page_format(name, page_tokens, dim, torch.float32)
    pages = form.encode(keys, values, counts)
    assert pages.shape == (4, form.page_bytes)
    assert pages.dtype == torch.uint8
    decoded = [form.back(x) for x in form.decode(pages)]
    bits = int(name[-1]) if form.packed else 16
    oracle = (kivi if name.startswith("kivi") else turboquant)(bits, page_tokens, 0) if form.packed else None
    for page, count in enumerate(counts.tolist()):
        wanted = keys[page, :count], values[page, :count]
        if oracle is not None:
            wanted = oracle.lose(*wanted)
        for x, y in zip(decoded, wanted, strict=True):
            torch.testing.assert_close(x[page, :count], y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "bits"), [("turboquant4", 4.25), ("turboquant3", 3.25), ("turboquant2", 2.25),
                                            ("kivi4", 5.0), ("kivi2", 3.0), ("plain", 16.0)])  # fmt: skip
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


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4]), st.integers(1, 3), st.sampled_from([2, 6, 32]), st.sampled_from([8, 24, 64]))
def test_packing_is_reversible(bits: int, pages: int, page_tokens: int, dim: int) -> None:
    rng = torch.Generator().manual_seed(dim)
    codes = torch.randint(0, 2**bits, (pages, page_tokens, dim), generator=rng).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (pages, page_tokens * dim * bits // 8)
    assert torch.equal(unpack(packed, bits, page_tokens), codes)


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_a_rotation_keeps_lengths(dim: int) -> None:
    torch.testing.assert_close(rotation(dim) @ rotation(dim).T, torch.eye(dim), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "page_tokens"), [(n, t) for n in FORMATS for t in (22, 32, 128) if t % 32 == 0 or not n.startswith("kivi")]
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
     ("turboquant3", 32, 44, "multiple of 8"), ("turboquant4", 7, 64, "even number")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(name: str, page_tokens: int, dim: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        page_format(name, page_tokens, dim, torch.float32)
