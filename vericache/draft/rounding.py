"""Slots of simulated pages: the context is rounded when it is compressed, verified tokens where they lie."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressors import Shape
from vericache.device import to_device
from vericache.draft.formats import Frozen, LayerTokens, Simulated, valid_tokens


@dataclass
class Rounding:
    """One slot's: ``context`` is the position of its first tail token, ``frozen`` what packing fixed in each layer, and
    the first ``strips`` of the tail are rounded."""

    form: Simulated
    shape: Shape
    context: int
    frozen: list[Frozen] = field(default_factory=list)
    strips: int = 0

    def compress(self, exact: Tensor, heads: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        """What packing leaves of the next layer's pages ``exact [N, 2, page_tokens, D]``. They belong to ``heads``
        int64 ``[N]`` and hold ``lengths`` int64 ``[N]`` tokens, at ``positions`` int64 ``[lengths.sum()]``."""
        valid = valid_tokens(lengths, self.form.page_tokens)
        grid = torch.zeros(valid.shape, dtype=torch.int64, device=exact.device)
        grid[valid] = positions
        tokens = LayerTokens(exact[:, 0], exact[:, 1], valid, grid, heads)
        self.frozen.append(self.form.freeze(tokens, self.shape))
        return self.form.rounded(tokens, self.frozen[-1])

    def fold(self, data: Tensor, tail: Tensor, strips: int) -> None:
        """Round the next ``strips`` of ``tail`` int32 ``[strips, L, H]`` in ``data`` (``PagePool.data``)."""
        size, heads, device = self.form.page_tokens, self.shape.kv_heads, data.device
        first = self.context + self.strips * size
        positions = (first + torch.arange(strips * size, device=device)).view(strips, size).repeat_interleave(heads, 0)
        owner = torch.arange(heads, device=device).repeat(strips)
        valid = torch.ones_like(positions, dtype=torch.bool)
        pages = to_device(tail[self.strips : self.strips + strips].long(), device)
        for layer, frozen in enumerate(self.frozen):
            where = pages[:, layer].flatten()
            exact = data[where].nan_to_num(0.0, 0.0, 0.0)
            tokens = LayerTokens(exact[:, 0], exact[:, 1], valid, positions, owner)
            data[where] = self.form.rounded(tokens, frozen)
        self.strips += strips

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.frozen)
