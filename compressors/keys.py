"""The cached keys of one layer, as scorers see them."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

LOGITS = 1 << 23  # float32 numbers held at a time


class CachedKeys:
    """Post-RoPE keys of one layer of a context: called with positions (int64 ``[m]``) it gives them, ``[H, m, D]``.

    What scorers compute over all of a context is a method, so that an engine can do it where its pages are.
    """

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        self._read = read

    def __call__(self, positions: Tensor) -> Tensor:
        return self._read(positions)

    def attention_received(
        self,
        query: Tensor,
        key: Tensor,
        start: int,
        stop: int,
        scale: float,
        sinks: int = 0,
        reduce: Literal["mean", "max"] = "mean",
    ) -> Tensor:
        """What the queries of a scoring row pay to the cached tokens ``start .. stop - 1``.

        Softmax over the first ``sinks`` cached tokens (not beyond ``start``), those asked about, and the row's own keys
        (causal), in float32; then over the row's queries and the query heads of a KV head.

        Args:
            query, key: the row's own, ``[T, Hq, D]`` and ``[T, H, D]``, post-RoPE.
            reduce: mean (SnapKV) or maximum (KVzip) over queries and heads.

        Returns:
            float32 ``[H, stop - start]``.
        """
        seen = torch.cat([torch.arange(sinks), torch.arange(start, stop)])
        keys = torch.cat([self(seen), key.transpose(0, 1)], 1).float()  # [H, J, D]
        rows, heads = len(query), len(keys)
        q = query.float().view(rows, heads, -1, query.shape[-1])  # [T, H, G, D]
        hidden = torch.full((rows, rows), float("-inf")).triu(1)[:, None]  # own keys behind a query
        out = torch.zeros(heads, stop - start)
        step = max(1, LOGITS // (q.shape[2] * keys.shape[1]))
        for head in range(heads):
            for part in range(0, rows, step):
                logits = q[part : part + step, head] @ keys[head].T * scale  # [t, G, J]
                logits[..., -rows:] += hidden[part : part + step]
                weights = logits.softmax(-1)[..., sinks : sinks + stop - start]
                if reduce == "mean":
                    out[head] += weights.sum((0, 1))
                else:
                    torch.maximum(out[head], weights.amax((0, 1)), out=out[head])
        return out / (rows * q.shape[2]) if reduce == "mean" else out
