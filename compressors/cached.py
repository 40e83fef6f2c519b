"""The cached keys and values of one layer, as scorers see them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOGITS = 1 << 23  # float32 numbers held at a time


def runs(num_tokens: int, width: int) -> tuple[Tensor, ...]:
    """Positions 0 .. num_tokens - 1, cut so that ``width`` float32 numbers a token of a run stay below ``LOGITS``."""
    return torch.arange(num_tokens).split(max(1, LOGITS // width))


@dataclass(frozen=True)
class Asked:
    """Cached tokens ``start .. stop - 1`` of a context, and what is asked about them: mean (SnapKV) or maximum (KVzip)
    over queries and heads. The softmax runs over the first ``sinks`` cached tokens (not beyond ``start``) as well.
    ``own``: what the row's own tokens receive is asked for too (H2O); those that cannot see one pay it nothing."""

    start: int
    stop: int
    sinks: int = 0
    reduce: Literal["mean", "max"] = "mean"
    own: bool = False

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def answers(self, row_tokens: int) -> int:
        """Numbers per KV head that a row of ``row_tokens`` gives."""
        return self.tokens + row_tokens * self.own


class CachedTokens:
    """Keys (post-RoPE) and values of one layer of a context, ``[H, m, D]`` in the cache's dtype, at any positions
    (int64 ``[m]``) of it.

    What scorers compute over all of a context is a method, so that an engine can do it where its pages are.
    """

    def __init__(self, keys: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor]) -> None:
        self._keys, self._values = keys, values

    def keys(self, positions: Tensor) -> Tensor:
        return self._keys(positions)

    def values(self, positions: Tensor) -> Tensor:
        return self._values(positions)

    def attention_received(self, query: Tensor, key: Tensor, asked: Asked, scale: float) -> Tensor:
        """What the queries of a scoring row pay to the tokens ``asked`` about.

        Softmax over sinks, those tokens, and the row's own keys (causal), in float32; then reduced over the row's
        queries and the query heads of a KV head.

        Args:
            query, key: the row's own, ``[T, Hq, D]`` and ``[T, H, D]``, post-RoPE.

        Returns:
            float32 ``[H, asked.answers(T)]``: of the tokens asked about, then of the row's own.
        """
        seen = torch.cat([torch.arange(asked.sinks), torch.arange(asked.start, asked.stop)])
        keys = torch.cat([self.keys(seen), key.transpose(0, 1)], 1).float()  # [H, J, D]
        rows, heads = len(query), len(keys)
        q = query.float().view(rows, heads, -1, query.shape[-1])  # [T, H, G, D]
        hidden = torch.full((rows, rows), float("-inf"), device=query.device).triu(1)  # own keys behind a query
        out = torch.zeros(heads, asked.answers(rows), device=query.device)
        step = max(1, LOGITS // (q.shape[2] * keys.shape[1]))
        for head in range(heads):
            for part in range(0, rows, step):
                logits = q[part : part + step, head] @ keys[head].T * scale  # [t, G, J]
                logits[..., -rows:] += hidden[part : part + step, None]
                weights = logits.softmax(-1)[..., asked.sinks : asked.sinks + out.shape[1]]
                if asked.reduce == "mean":
                    out[head] += weights.sum((0, 1))
                else:
                    torch.maximum(out[head], weights.amax((0, 1)), out=out[head])
        return out / (rows * q.shape[2]) if asked.reduce == "mean" else out
