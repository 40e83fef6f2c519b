"""What the kernels of certified attention hand on, on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.certified.attention import ROUNDS
from vericache.certified.sketch import GROUP


@dataclass(frozen=True)
class Workspace:
    """One for all rows and layers, which are attended one after another. H KV heads of G queries; ``width`` columns,
    the tokens of a context, then those behind it.

    Float32 ``[H, G, width]``: ``estimated`` and ``exact`` logits, ``upper`` weights w+, ``share`` of tokens in a bound.
    ``sigma`` float32 ``[H, G, width / 32]``. ``certain`` uint8 ``[H, width]``: enters with its own weight. Of queries
    ``[H, G]``: ``shift`` float32, ``bias`` float64, ``cut`` and ``excessive`` int32. ``error`` float64
    ``[turns, H, G]``: certificates. ``fallback`` int32 ``[H]``: every token was read.
    ``mixed`` float32 ``[H, P, G, D]`` and ``mass`` ``[H, P, G]``: the sums of P programs a head.
    """

    estimated: Tensor
    exact: Tensor
    upper: Tensor
    share: Tensor
    sigma: Tensor
    certain: Tensor
    shift: Tensor
    bias: Tensor
    cut: Tensor
    excessive: Tensor
    error: Tensor
    fallback: Tensor
    mixed: Tensor
    mass: Tensor

    @classmethod
    def of(cls, heads: int, group: int, dim: int, columns: int, programs: int, device: torch.device) -> "Workspace":
        """For contexts and tails of up to ``columns`` tokens together."""
        width = -(-columns // GROUP) * GROUP

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(heads, *shape, dtype=dtype, device=device)

        every = torch.empty(ROUNDS + 2, heads, group, dtype=torch.float64, device=device)
        return cls(
            estimated=empty(group, width),
            exact=empty(group, width),
            upper=empty(group, width),
            share=empty(group, width),
            sigma=empty(group, width // GROUP),
            certain=empty(width, dtype=torch.uint8),
            shift=empty(group),
            bias=empty(group, dtype=torch.float64),
            cut=empty(group, dtype=torch.int32),
            excessive=empty(group, dtype=torch.int32),
            error=every,
            fallback=empty(dtype=torch.int32),
            mixed=empty(programs, group, dim),
            mass=empty(programs, group),
        )

    @property
    def columns(self) -> int:
        return self.exact.shape[-1]
