"""Symmetric quantisation of one token's channels by their largest absolute value, with bins per layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.base import MethodError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEWEST, MOST = 4, 256  # bins
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Bins:
    """Bins of each layer's keys and values, even numbers from 4 to 256: ``bins - 1`` levels, symmetric around zero."""

    keys: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, layers: int) -> "Bins":
        """LMCache's choice for models of 32 layers: 32 bins for keys in the first third and for values in the first
        two layers, 16 behind them (deeper layers bear coarser bins: CacheGen, section 5.1)."""
        fine = max(1, round(layers / 3))
        return cls(
            tuple(32 if layer < fine else 16 for layer in range(layers)),
            tuple(32 if layer < 2 else 16 for layer in range(layers)),
        )

    def check(self, layers: int) -> None:
        """Raise MethodError unless every one of ``layers`` layers has a number of bins that exists."""
        for name, bins in (("keys", self.keys), ("values", self.values)):
            if len(bins) != layers:
                raise MethodError(f"bins for {name} of {len(bins)} layers, expected {layers}; give one for each layer")
            for layer, b in enumerate(bins):
                if not FEWEST <= b <= MOST or b % 2:
                    raise MethodError(
                        f"{b} bins for {name} of layer {layer}, expected an even number from {FEWEST} to {MOST}"
                    )


def levels(bins: int) -> int:
    """Levels above zero, CacheGen's C: symbols are ``0 .. 2 C``, of which C is zero."""
    return bins // 2 - 1


def quantise(x: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Symbols ``round(x C / peak) + C``.

    Args:
        x: ``[n, channels]``, in one of ``DTYPES``.

    Returns:
        symbols uint8 ``[n, channels]`` and peaks, the largest absolute values, ``[n]`` in the dtype of ``x``: exact, so
        that nobody rounds them differently. Vectors below the smallest normal float32 number become zeros.

    Raises:
        MethodError: a value that is not finite.
    """
    peaks = x.abs().amax(-1)
    if not peaks.isfinite().all():
        token = int((~peaks.isfinite()).nonzero()[0])
        raise MethodError(f"KV of token {token} is not finite; expected finite values, look at what computed them")
    divisor = peaks.float()
    divisor = torch.where(divisor < TINY, 1.0, divisor)
    symbols = (x.float() / divisor[:, None] * levels(bins)).round_() + levels(bins)
    return symbols.to(torch.uint8), peaks


def dequantise(symbols: Tensor, peaks: Tensor, bins: int) -> Tensor:
    """The inverse, up to rounding: ``[n, channels]`` in the dtype of ``peaks``."""
    scaled = (symbols.float() - levels(bins)) / levels(bins) * peaks.float()[:, None]
    return scaled.to(peaks.dtype)


def by_token(x: Tensor) -> Tensor:
    """One layer ``[H, n, D]`` as ``[n, H * D]``: all channels of a token side by side."""
    return x.transpose(0, 1).flatten(1)


def by_head(x: Tensor, heads: int) -> Tensor:
    """The inverse of ``by_token``."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1)


def fake_quant(keys: Tensor, values: Tensor, bins: Bins | None = None) -> tuple[Tensor, Tensor]:
    """What the other side gets: quantised and back, bit by bit what ``decode(encode(keys, values, bins))`` gives.

    Args:
        keys, values: ``[L, H, n, D]``, finite, in one of ``DTYPES``.

    Returns:
        Both, of the same shape and dtype.
    """
    bins = checked(keys, values, bins)
    lossy = []
    for tensor, of_layer in ((keys, bins.keys), (values, bins.values)):
        layers = [dequantise(*quantise(by_token(x), b), b) for x, b in zip(tensor, of_layer, strict=True)]
        lossy.append(torch.stack([by_head(x, keys.shape[1]) for x in layers]))
    return lossy[0], lossy[1]


def checked(keys: Tensor, values: Tensor, bins: Bins | None) -> Bins:
    """The bins to use; raises MethodError when the tensors are not a KV cache that can be encoded."""
    if keys.ndim != 4 or 0 in keys.shape or values.shape != keys.shape:
        raise MethodError(
            f"keys of shape {tuple(keys.shape)} and values of shape {tuple(values.shape)}, expected both [L, H, n, D] "
            "with at least one of each"
        )
    if keys.dtype not in DTYPES or values.dtype != keys.dtype:
        raise MethodError(f"keys in {keys.dtype} and values in {values.dtype}, expected both in one of {DTYPES}")
    bins = bins or Bins.of(len(keys))
    bins.check(len(keys))
    return bins
