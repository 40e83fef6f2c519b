"""KIVI."""

import torch
from torch import Tensor

from vericache.draft.formats.base import PageFormat, valid_tokens
from vericache.draft.formats.packing import pack, unpack
from vericache.draft.formats.uniform import uniform_codes
from vericache.errors import ConfigError


class Kivi(PageFormat):
    """KIVI (arXiv 2402.02750): asymmetric uniform codes, keys in groups of 32 tokens of one channel, values in groups
    of 32 channels of one token, with scale and zero point in float16 per group."""

    kind = 2
    GROUP = 32

    def __init__(self, bits: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        if page_tokens % self.GROUP or head_dim % self.GROUP:
            raise ConfigError(
                f"kivi{bits} packs groups of {self.GROUP} tokens and channels, got page_tokens {page_tokens} and head "
                f"size {head_dim}; set page_tokens to a multiple of {self.GROUP}, or page_format to turboquant{bits}"
            )
        self.bits = bits
        self.code_bytes = page_tokens * head_dim * bits // 8
        self.groups = page_tokens * head_dim // self.GROUP
        super().__init__(2 * self.code_bytes + 8 * self.groups, page_tokens, head_dim, dtype)

    def encode(self, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
        valid = valid_tokens(counts, self.page_tokens)
        grouped = keys.float().unflatten(1, (-1, self.GROUP))  # [N, PT / g, g, D]
        mine = valid.unflatten(1, (-1, self.GROUP))[..., None]
        key_codes, *key_ranges = uniform_codes(grouped, self.bits, 2, mine)
        grouped = values.float().unflatten(2, (-1, self.GROUP))  # [N, PT, D / g, g]
        value_codes, *value_ranges = uniform_codes(grouped, self.bits, 3, valid[..., None, None])
        codes = (key_codes.flatten(1, 2), value_codes.flatten(2, 3))
        return self._pages(*(pack(c, self.bits) for c in codes), *key_ranges, *value_ranges)

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        size, groups, bits, n = self.code_bytes, self.groups, self.bits, self.page_tokens
        ranges = pages[:, 2 * size : 2 * size + 8 * groups].contiguous().view(torch.float16).float().split(groups, 1)
        key_range = [r.view(-1, n // self.GROUP, 1, self.head_dim) for r in ranges[:2]]
        value_range = [r.view(-1, n, self.head_dim // self.GROUP, 1) for r in ranges[2:]]
        keys = unpack(pages[:, :size], bits, n).float().unflatten(1, (-1, self.GROUP))
        values = unpack(pages[:, size : 2 * size], bits, n).float().unflatten(2, (-1, self.GROUP))
        return (
            (keys * key_range[0] + key_range[1]).flatten(1, 2),
            (values * value_range[0] + value_range[1]).flatten(2, 3),
        )
