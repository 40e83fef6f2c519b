"""``tests.reference`` with the attention of all rows of a forward in one go. On a GPU a row at a time is thousands of
small kernels; what is computed is the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.reference import Past, Reference, Row

PASTS = 16  # contexts as compressed by one method

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]  # layer, q [Hq, T, D], k, v [H, T, D], scale


@dataclass(frozen=True)
class Batch:
    """Rows side by side, R of at most T tokens, each with at most M tokens to see: those of its pasts, then the
    round's, the last of which are the row's own inputs.

    Attributes:
        pasts: that some row sees, each once.
        seen: int64 ``[R, M]``, places among the tokens of all ``pasts`` and then of all rows' rounds.
        limits: int64 ``[R, T]``, how many of ``seen`` each token sees.
        inputs: int64 ``[R, T]``, places among the tokens of the forward.
        outputs: int64, of each token of the forward its place in ``[R, T]``.
    """

    rows: Sequence[Row]
    pasts: Sequence[Past]
    seen: Tensor
    limits: Tensor
    inputs: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], even: Callable[[Past], Past]) -> "Batch":
        """``even``: gives a past the same number of tokens in all layers."""
        pasts, starts, end = list[Past](), dict[int, int](), 0
        told = [[even(past) for past in row.pasts] for row in rows]
        for past in (past for some in told for past in some):
            if id(past) not in starts:
                pasts.append(past)
                starts[id(past)], end = end, end + past.length
        seen, limits, inputs, at = [], [], [], 0
        for row, some in zip(rows, told, strict=True):
            count, before = len(row.ids), row.own.length
            places = [i for p in some for i in range(starts[id(p)], starts[id(p)] + p.length)]
            seen.append([*places, *range(end, end + before + count)])
            limits.append([len(places) + before + i + 1 for i in range(count)])
            inputs.append(list(range(at, at + count)))
            at, end = at + count, end + before + count
        most = max(map(len, inputs))
        outputs = [r * most + i for r, row in enumerate(rows) for i in range(len(row.ids))]
        return cls(rows, pasts, padded(seen, 0), padded(limits, 1), padded(inputs, 0), torch.tensor(outputs))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [Hq, n, D]``, ``key`` and ``value [H, n, D]`` of the n tokens of the forward -> ``[Hq, n, D]``."""
        heads, _, dim = key.shape
        rows, most = self.inputs.shape
        keys, values = self._stored(layer, key, value)
        asked = query.view(heads, -1, query.shape[1], dim)[:, :, self.inputs] * scale  # [H, G, R, T, D]
        logits = torch.einsum("hgrtd,hrmd->hrgtm", asked, keys[:, self.seen])
        visible = self._visible(layer, keys)[:, self.seen, None, None].transpose(2, 4)  # [H, R, 1, 1, M]
        within = torch.arange(self.seen.shape[1]) < self.limits[:, :, None]
        logits.masked_fill_(~(visible & within[:, None]), float("-inf"))
        out = torch.einsum("hrgtm,hrmd->hgrtd", logits.softmax(-1), values[:, self.seen])
        return out.reshape(-1, rows * most, dim)[:, self.outputs]

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens that ``seen`` speaks of; the rows learn their rounds' KV."""
        counts, found = [len(row.ids) for row in self.rows], []
        for name, new in (("keys", key), ("values", value)):
            parts = list[Tensor]()
            for row, mine in zip(self.rows, new.split(counts, 1), strict=True):
                parts += [getattr(row.own, name)[layer], mine] if row.own.length else [mine]
            rounds = torch.cat(parts, 1)
            lengths = [row.own.length + count for row, count in zip(self.rows, counts, strict=True)]
            for row, mine in zip(self.rows, rounds.split(lengths, 1), strict=True):
                getattr(row, name).append(mine)
            found.append(torch.cat([*(getattr(past, name)[layer] for past in self.pasts), rounds], 1))
        return found[0], found[1]

    def _visible(self, layer: int, keys: Tensor) -> Tensor:
        """bool ``[H, N]``."""
        everything = torch.ones(keys.shape[:2], dtype=torch.bool)
        at = 0
        for past in self.pasts:
            if past.visible is not None:
                everything[:, at : at + past.length] = past.visible[layer]
            at += past.length
        return everything


class Together(Reference):
    """``together`` computes the attention of all rows of a forward at once, where it is set."""

    together: Attend | None = None

    def decoded(self, rows: Sequence[Row], attend: Attend) -> list[Tensor]:
        """Logits ``[T, vocab]`` of each row, whose attention is ``attend``'s."""
        self.together = attend
        try:
            return self.forward(rows)
        finally:
            self.together = None

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if self.together is None:
            return super()._attention(module, query, key, value, mask, scaling, **kwargs)
        return self.together(module.layer_idx, query[0], key[0], value[0], scaling).transpose(0, 1)[None], None


class BatchedReference(Together):
    """Rows that are watched, or attend in another way, are computed one by one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._even: dict[int, tuple[Past, Past]] = {}  # by id, which is the first one's as long as that is here

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        self.together = Batch.of(rows, self._evened).attend if all(type(row) is Row for row in rows) else None
        return super().forward(rows)

    def _evened(self, past: Past) -> Past:
        if past.visible is None:
            return past
        if id(past) not in self._even:
            if len(self._even) >= PASTS:
                self._even.clear()
            self._even[id(past)] = past, evened(past)
        return self._even[id(past)][1]


def evened(past: Past) -> Past:
    """With tokens that nobody sees at the end of layers that have fewer than others."""
    assert past.visible is not None
    most = max(keys.shape[1] for keys in past.keys)
    keys, values = ([pad(x, (0, 0, 0, most - x.shape[1])) for x in side] for side in (past.keys, past.values))
    return Past(keys, values, [pad(x, (0, most - x.shape[1])) for x in past.visible])


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """int64, the rows filled up with ``value``."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (most - len(row))] for row in rows])
