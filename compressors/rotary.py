"""The model's rotary position embedding: keys and queries turned to a position, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.errors import MethodError


@dataclass(frozen=True)
class Rotary:
    """RoPE (Su et al., 2021) as the model applies it: dimensions are turned in pairs, by an angle that depends on the
    position and the pair.

    Attributes:
        cos_sin: ``[P, rot]``, cosines of the rot/2 pairs, then their sines, of positions 0 .. P - 1. Frequency scaling
            and attention factors of the model (YaRN's, say) are in them. The first ``rot`` of D dimensions turn.
        neox: pairs are ``(i, i + rot/2)``; otherwise ``(2 i, 2 i + 1)``.
    """

    cos_sin: Tensor
    neox: bool

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [..., m, D]`` at no position -> float32 at ``positions`` (int64 ``[m]``).

        Raises MethodError for a position outside the model's table.
        """
        cos, sin = self.angles(positions)
        return self._rotated(x, cos, sin)

    def back(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of ``turn``: ``x [..., m, D]`` at ``positions`` -> float32 at no position.

        Exact also for a table with an attention factor, or one rounded to the model's dtype, whose cos^2 + sin^2 is
        not 1.
        """
        cos, sin = self.angles(positions)
        norm = cos.square() + sin.square()
        return self._rotated(x, cos / norm, -sin / norm)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the pairs at ``positions`` (int64 ``[m]``), float32 ``[m, rot/2]`` each."""
        length = len(self.cos_sin)
        if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= length):
            raise MethodError(
                f"positions {int(positions.min())} .. {int(positions.max())} were asked for, the model's rotary "
                f"embedding has 0 .. {length - 1}; a method must stay inside (``len(rotary.cos_sin)``)"
            )
        cos, sin = self.cos_sin[positions].float().chunk(2, -1)
        return cos, sin

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rot = self.cos_sin.shape[-1]
        x = x.float()
        turning, rest = x[..., :rot], x[..., rot:]
        if self.neox:
            a, b = turning.chunk(2, -1)
        else:
            a, b = turning[..., ::2], turning[..., 1::2]
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.cat(pair, -1) if self.neox else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned, rest], -1)
