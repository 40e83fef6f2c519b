"""TOVA (Oren et al., 2024): what the last token looks at."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from compressors.cached import Asked, CachedTokens
from compressors.replay import WindowReplay


class TOVA(WindowReplay):
    """Mean attention of the last ``window`` tokens (one in the paper) over all heads of a layer, which therefore keep
    the same tokens. The paper drops one token a step; here what is kept is chosen at once."""

    name = "tova"
    summary = "attention of the last token, the same tokens in all heads of a layer; query-aware"
    options: ClassVar[Mapping[str, int]] = {"window": 1}

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        past = self.num_tokens - len(query)
        if past:
            self._scores[layer, :, :past] = cached.attention_received(query, key, Asked(0, past), scale).mean(0)
