"""Sketches of keys: a few bits for every token, from which the logits of all tokens are estimated (VerKV's selector).

A sketch holds all n keys of a KV head, resident or not. Its logits are estimates, and so is ``sigma``, their standard
deviation, which the certificate may take as a radius (``Weights.of``).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.draft.formats import TurboQuant, pack, unpack
from vericache.draft.formats.uniform import LARGEST, uniform_codes
from vericache.errors import CompressionError, ConfigError

GROUP = 32  # tokens that share the range of a channel
NORM_SLACK = 1e-6  # rounding of a norm in float32


class KeySketch(ABC):
    """Of the ``tokens`` keys of each of H heads, behind RoPE. ``codes`` uint8 ``[H, ...]``."""

    codes: Tensor
    tokens: int

    @abstractmethod
    def logits(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Estimated logits ``scale q.k`` of all keys and their ``sigma``, float32 ``[H, G, n]`` each, for queries
        ``[H, G, D]``, behind RoPE."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors it holds."""
        return sum(held.nbytes for held in vars(self).values() if isinstance(held, Tensor))

    @property
    def token_bytes(self) -> float:
        """Bytes per token and head; the full cache has ``4 D`` in 16 bits."""
        return self.nbytes / (len(self.codes) * self.tokens)


@dataclass(frozen=True)
class PerChannel(KeySketch):
    """KIVI's codes of keys, with 2 bits: the range of a channel over 32 tokens in three equal steps. ``codes`` uint8
    ``[H, groups * 32 * D / 4]``; ``steps`` and ``zeros`` float16 ``[H, groups, 1, D]``. D / 4 + D / 8 bytes a token.

    For a context that is fixed: a token alone has no range.
    """

    codes: Tensor
    steps: Tensor
    zeros: Tensor
    tokens: int

    @classmethod
    def of(cls, keys: Tensor) -> "PerChannel":
        tokens = keys.shape[1]
        padding = -tokens % GROUP
        padded = torch.nn.functional.pad(keys.float(), (0, 0, 0, padding)).unflatten(1, (-1, GROUP))
        valid = (torch.arange(tokens + padding, device=keys.device) < tokens).view(1, -1, GROUP, 1)
        codes, steps, zeros = uniform_codes(padded, 2, 2, valid)
        return cls(pack(codes.flatten(1, 2), 2), steps, zeros, tokens)

    def logits(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Sigma is that of rounding errors that are uniform within a step, independent over channels:
        ``scale^2 sum over channels of q^2 step^2 / 12``."""
        q, steps = queries.float(), self.steps.float()
        codes = unpack(self.codes, 2, steps.shape[1] * GROUP).float().unflatten(1, (-1, GROUP))
        keys = (codes * steps + self.zeros.float()).flatten(1, 2)[:, : self.tokens]
        variance = q.square() @ (steps.square() / 12).squeeze(2).mT  # [H, G, groups]
        sigma = variance.sqrt().repeat_interleave(GROUP, -1)[..., : self.tokens]
        return q @ keys.mT * scale, sigma * scale


@dataclass(frozen=True)
class Rotated(KeySketch):
    """TurboQuant's codes of keys, with 1 bit their signs, each token alone. ``codes`` uint8 ``[H, n D bits / 8]``,
    ``scales`` and ``residuals`` float16 ``[H, n]``. D bits / 8 + 4 bytes a token.

    Rounded keys are shorter than keys along their own direction, by a share that depends on the bits. Each scale undoes
    its token's: with ``k^`` what is stored, ``k.k^ = |k|^2``, so that logits have no bias over rotations
    (RaBitQ's estimator, arXiv 2405.12497). ``residuals`` are ``|k - k^|``.
    """

    codes: Tensor
    scales: Tensor
    residuals: Tensor
    bits: int
    tokens: int

    @classmethod
    def of(cls, keys: Tensor, bits: int) -> "Rotated":
        _, tokens, dim = keys.shape
        codec = TurboQuant(bits, tokens, dim, torch.float32)
        turned = codec.turn(keys.float())
        codes, scales = codec.codes(keys)
        rounded = codec.numbers(codes, scales.float()[..., None])
        along = (turned * rounded).sum(-1)
        longer = torch.where(along > 0, turned.square().sum(-1) / along, 0.0)
        scales = (scales.float() * longer).clamp(max=LARGEST).half()
        residuals = (turned - codec.numbers(codes, scales.float()[..., None])).norm(dim=-1).clamp(max=LARGEST).half()
        return cls(pack(codes, bits), scales, residuals, bits, tokens)

    def logits(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Sigma is that of residuals whose directions are uniform: ``scale |q| |k - k^| / sqrt(D)``."""
        dim = queries.shape[-1]
        codec = TurboQuant(self.bits, self.tokens, dim, torch.float32)
        q = codec.turn(queries.float())
        keys = codec.numbers(unpack(self.codes, self.bits, self.tokens), self.scales.float()[..., None])
        sigma = q.norm(dim=-1, keepdim=True) * self.residuals.float()[:, None] * (scale / math.sqrt(dim))
        return q @ keys.mT * scale, sigma


# From the fewest decisions that fail on real keys to the most; signs are too coarse to certify from.
SKETCHES: dict[str, Callable[[Tensor], KeySketch]] = {
    "per_channel2": PerChannel.of,
    "rotated2": lambda keys: Rotated.of(keys, 2),
    "sign": lambda keys: Rotated.of(keys, 1),
}


def sketch_keys(keys: Tensor, name: str = "per_channel2") -> KeySketch:
    """The sketch called ``name`` of ``keys [H, n, D]``, any float dtype, behind RoPE.

    Raises:
        ConfigError: an unknown name, or a head size that is no multiple of 8.
        CompressionError: keys that are not finite.
    """
    if name not in SKETCHES:
        raise ConfigError(f"key sketch {name!r} is unknown, expected one of {', '.join(SKETCHES)}")
    if keys.shape[-1] % 8:
        raise ConfigError(f"key sketches pack heads whose size is a multiple of 8, got head size {keys.shape[-1]}")
    if not keys.isfinite().all():
        raise CompressionError(
            f"{int((~keys.isfinite()).any(-1).sum())} of {keys[..., 0].numel()} keys are not finite, expected "
            f"finite ones to sketch; see why the model computes them"
        )
    return SKETCHES[name](keys)


def value_norms(values: Tensor) -> Tensor:
    """``|v|`` of ``values [H, n, D]``, rounded up: float16 ``[H, n]``. The output's bound needs no more.

    Raises:
        CompressionError: values that are not finite, or too long for float16.
    """
    norms = values.float().norm(dim=-1) * (1 + NORM_SLACK)
    nearest = norms.half()
    # The next larger number of a positive float16 has the next larger bits.
    found = (nearest.view(torch.int16) + (nearest.float() < norms)).to(torch.int16).view(torch.float16)
    if not found.isfinite().all():
        raise CompressionError(
            f"{int((~found.isfinite()).sum())} of {found.numel()} values are not finite or longer than {LARGEST:.0f}, "
            f"expected shorter ones to bound the output; see why the model computes them"
        )
    return found
