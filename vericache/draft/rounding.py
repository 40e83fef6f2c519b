"""Slots of simulated pages: the context is rounded when it is compressed, verified tokens where they lie."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressors import Kept, Shape
from vericache.device import to_device
from vericache.draft.formats import LayerTokens, Simulated, valid_tokens


@dataclass
class Rounding:
    """One slot's: ``context`` is the position of its first tail token, ``frozen`` what packing fixed in each layer, and
    the first ``strips`` of the tail are rounded. ``packed_bytes``: of the compressed context if it were packed."""

    form: Simulated[Any]
    shape: Shape
    context: int
    packed_bytes: int
    frozen: list[Any] = field(default_factory=list)
    strips: int = 0

    def compress(self, exact: Tensor, heads: Tensor, lengths: Tensor, kept: Kept) -> Tensor:
        """What packing leaves of the next layer's pages ``exact [N, 2, page_tokens, D]``, filled with what is ``kept``
        there. They belong to ``heads`` int64 ``[N]`` and hold ``lengths`` int64 ``[N]`` tokens."""
        layer, valid = len(self.frozen), valid_tokens(lengths, self.form.page_tokens)

        def grid(of_tokens: Tensor) -> Tensor:
            found = torch.zeros(valid.shape, dtype=of_tokens.dtype, device=exact.device)
            found[valid] = of_tokens
            return found

        bits = kept.layer_bits(layer)
        positions, bits = grid(kept.layer(layer)), None if bits is None else grid(bits)
        tokens = LayerTokens(exact[:, 0], exact[:, 1], valid, positions, heads, bits)
        self.frozen.append(self.form.freeze(layer, tokens, self.shape))
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
