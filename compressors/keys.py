"""The cached keys of one layer, as scorers see them."""

from collections.abc import Callable

import torch
from torch import Tensor


class CachedKeys:
    """Post-RoPE keys of one layer of a context: called with positions (int64 ``[m]``) it gives them, ``[H, m, D]``.

    What scorers compute over all of a context is a method, so that an engine can do it where its pages are.
    """

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        self._read = read

    def __call__(self, positions: Tensor) -> Tensor:
        return self._read(positions)

    def window_attention(self, query: Tensor, num_tokens: int, scale: float) -> Tensor:
        """Mean attention of the last queries of a context to what lies before them (SnapKV's observation window).

        Args:
            query: ``[W, Hq, D]``, post-RoPE, of the last W of the context's ``num_tokens`` positions.

        Returns:
            float32 ``[H, num_tokens - W]``: causal softmax weights, mean over the W queries of the G query heads of
            each KV head.
        """
        keys = self(torch.arange(num_tokens)).float()  # [H, n, D]
        heads, window = len(keys), len(query)
        group, past = query.shape[1] // heads, num_tokens - window
        # All queries of a KV head in one product: broadcasting over G would copy the keys G times.
        q = query.float().view(window, heads, group, -1).permute(1, 0, 2, 3).reshape(heads, window * group, -1)
        logits = (q @ keys.transpose(-1, -2) * scale).view(heads, window, group, num_tokens)
        logits[..., past:] += torch.full((window, window), float("-inf")).triu(1)[:, None]
        return logits.softmax(-1)[..., :past].mean((1, 2))
