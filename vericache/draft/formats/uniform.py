"""Asymmetric uniform codes: the range of a group in 2^b - 1 equal steps."""

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float16).max
SMALLEST = 6e-8  # the least step that is not 0 in float16, for groups of one number


def uniform_codes(x: Tensor, bits: int, along: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 codes of float32 ``x``, and scale and zero in float16 of each group, which lies ``along`` one dimension
    (kept, with size 1). Codes are made with the rounded ones, which the decoder has.

    ``valid`` bool, to be broadcast: what else has no part in the range. A group without any has the range 0.
    """
    low, high = x, x
    if valid is not None:
        low, high = x.masked_fill(~valid, float("inf")), x.masked_fill(~valid, float("-inf"))
    low, high = low.amin(along, keepdim=True), high.amax(along, keepdim=True)
    low, high = (torch.where(low.isfinite(), bound, 0.0) for bound in (low, high))
    scale = ((high - low) / (2**bits - 1)).half().clamp(SMALLEST, LARGEST)
    zero = low.half().clamp(-LARGEST, LARGEST)
    code = ((x - zero.float()) / scale.float()).nan_to_num().round().clamp(0, 2**bits - 1)
    return code.to(torch.uint8), scale, zero
