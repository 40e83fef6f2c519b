"""KVQuant's pages against a plain rounding of single tokens, and what freezing promises."""

from dataclasses import replace

import pytest
import torch

from compressors import Kept, Rotary, Shape
from tests.kvquant_oracle import SINKS, Fit, Run, fitted, lost
from tests.tensor.arena_world import neox_rotary
from vericache.draft.formats import Frozen, LayerTokens, page_format, pages_per_head, valid_tokens
from vericache.draft.formats.kvquant import KVQuantPages
from vericache.errors import CompressionError, ConfigError, UnsupportedError

HEADS, THETA = 2, 1e4


def rotary(dim: int) -> Rotary:
    return neox_rotary(dim, THETA, 512)


def runs(dim: int, counts: list[int], seed: int) -> list[Run]:
    """Tokens of each head at positions with gaps, the first ones sinks; some channels are large, some numbers far
    out."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for count in counts:
        keys = torch.randn(count, dim, generator=rng) + 5 * torch.randn(dim, generator=rng)
        keys += 30 * (torch.rand(count, dim, generator=rng) < 0.003)
        values = torch.randn(count, dim, generator=rng) * torch.rand(count, 1, generator=rng)
        gaps = torch.randint(1, 4, (count,), generator=rng)
        gaps[:SINKS] = 1
        positions = gaps.cumsum(0) - 1
        found.append((rotary(dim).turn(keys, positions), values, positions))
    return found


def pages_of(found: list[Run], page_tokens: int) -> LayerTokens:
    """Every run in pages of its own."""
    pages = []
    for head, run in enumerate(found):
        for keys, values, positions in zip(*(x.split(page_tokens) for x in run), strict=True):
            missing = page_tokens - len(keys)
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (keys, values))
            valid = valid_tokens(torch.tensor([len(keys)]), page_tokens)[0]
            pages.append((k, v, valid, torch.nn.functional.pad(positions, (0, missing)), torch.tensor(head)))
    return LayerTokens(*(torch.stack(column) for column in zip(*pages, strict=True)))


def form_of(bits: int, dim: int, page_tokens: int = 32, dtype: torch.dtype = torch.float32) -> KVQuantPages:
    form = page_format(f"kvquant{bits}", page_tokens, dim, dtype)
    assert isinstance(form, KVQuantPages)
    return form


def freeze(form: KVQuantPages, tokens: LayerTokens) -> Frozen:
    return form.freeze(0, tokens, Shape(1, HEADS, HEADS, form.head_dim, rotary(form.head_dim)))


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_decoded_pages_are_the_oracles(bits: int, dim: int) -> None:
    """With the same thresholds and levels. A number in the middle between two levels may go to either."""
    found = runs(dim, [75, 9], dim + bits)
    form, tokens = form_of(bits, dim), pages_of(found, 32)
    frozen = freeze(form, tokens)
    fit = Fit(*frozen.thresholds.double().unbind(1), *frozen.levels.double())
    got = form.rounded(tokens, frozen)
    for head, run in enumerate(found):
        mine = got[tokens.heads == head].transpose(0, 1).flatten(1, 2)[:, : len(run[0])]
        for x, wanted in zip(mine, lost(run, fit, head, 32, THETA), strict=True):
            assert ((x - wanted).abs() > 1e-3).sum() <= 1 + x.numel() / 2000
            assert torch.equal(x[:SINKS], wanted[:SINKS])


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_what_is_frozen_is_the_oracles(bits: int) -> None:
    """A number in the middle between two clusters moves both by little."""
    found = runs(64, [75, 40], bits)
    frozen, fit = freeze(form_of(bits, 64), pages_of(found, 32)), fitted(found, bits, THETA)
    low, high = frozen.thresholds.double().unbind(1)
    for got, wanted in ((low, fit.low), (high, fit.high)):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=1e-4)
    for got, wanted in zip(frozen.levels.double(), (fit.key_levels, fit.value_levels), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_pages_that_come_later_get_the_codes_they_would_have_got(bits: int) -> None:
    """Appended one page at a time equals encoded at once, bit for bit, in any page size whose pages are not full."""
    found = runs(64, [96, 64], 1)
    form, tokens = form_of(bits, 64), pages_of(found, 32)
    frozen = freeze(form, tokens)
    at_once = form.codec.encode(tokens, frozen)
    for page in range(len(at_once)):
        alone = LayerTokens(*(x[page : page + 1] for x in vars(tokens).values() if x is not None))
        assert torch.equal(form.codec.encode(alone, frozen), at_once[page : page + 1])


@pytest.mark.parametrize(("dim", "bits", "wanted"), [(64, 4, 4.875), (64, 2, 2.875), (128, 4, 4.609), (128, 3, 3.609)])
def test_bits_of_an_element(dim: int, bits: int, wanted: float) -> None:
    """Codes, thresholds of values, outliers and where they are, positions; what a slot freezes is counted apart."""
    form = form_of(bits, dim, 32, torch.bfloat16)
    assert form.codec.page_bytes * 8 / (2 * 32 * dim) == pytest.approx(wanted, abs=1e-3)
    assert form.page_bytes == 2 * 32 * dim * 2
    tokens = pages_of(runs(dim, [40, 40], 2), 32)
    frozen = freeze(form, tokens)
    assert form.codec.encode(tokens, frozen).shape == (4, form.codec.page_bytes)
    assert frozen.nbytes == form.frozen_bytes(1, HEADS)
    kept = Kept(torch.tensor([[40, 33], [64, 1]]), torch.zeros(138, dtype=torch.int64))
    beside = 4 * int(pages_per_head(kept.counts, 32).sum()) + 4 * kept.counts.numel() + 2 * frozen.nbytes
    assert form.packed_bytes(kept) == 7 * form.codec.page_bytes + beside


@pytest.mark.parametrize("number", [0.0, 0.1, -3e4])
def test_constant_channels_and_tokens(number: float) -> None:
    """Also where no float16 number equals them."""
    positions = torch.arange(40)
    keys = rotary(64).turn(torch.full((40, 64), number), positions)
    found = [(keys, torch.full((40, 64), number), positions) for _ in range(HEADS)]
    form, tokens = form_of(4, 64), pages_of(found, 32)
    got = form.rounded(tokens, freeze(form, tokens))
    for page, valid in enumerate(tokens.valid):
        torch.testing.assert_close(got[page, 0][valid], tokens.keys[page][valid], rtol=2e-3, atol=abs(number) * 1e-3)
        torch.testing.assert_close(got[page, 1][valid], tokens.values[page][valid], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("counts", [[1, 1], [SINKS, SINKS], [SINKS + 1, 40], [2, 33]])
def test_few_tokens(counts: list[int]) -> None:
    """Heads that keep less than a page, nothing but sinks, or one token to fit to."""
    found = runs(64, counts, 3)
    form, tokens = form_of(2, 64), pages_of(found, 32)
    frozen = freeze(form, tokens)
    got = form.rounded(tokens, frozen)
    assert got.isfinite().all()
    sink = tokens.valid & (tokens.positions < SINKS)
    assert torch.equal(got[:, 0][sink], tokens.keys[sink])
    later = replace(tokens, positions=tokens.positions + 50)
    assert form.rounded(later, frozen).isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    form, tokens = form_of(4, 64), pages_of(runs(64, [40, 40], 4), 32)
    frozen = freeze(form, tokens)
    tokens.keys[1, 9:] = number  # behind its tokens, which are 8
    assert form.rounded(tokens, frozen)[tokens.valid[:, None].expand(-1, 2, -1)].isfinite().all()
    tokens.keys[1, 3, 3] = number
    for action in (lambda: freeze(form, tokens), lambda: form.codec.encode(tokens, frozen)):
        with pytest.raises(CompressionError, match="1 of 80 tokens"):
            action()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens 1024"):
        form_of(4, 128, 1024)
    with pytest.raises(UnsupportedError, match="kvquant2 packs keys as they are before RoPE"):
        form_of(2, 64).require(Shape(1, 1, 1, 64))
