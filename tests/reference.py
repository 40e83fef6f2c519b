"""An independent prediction of every round's accepted length: a Hugging Face forward in float32, teacher-forced.

Shares with the engine the kept positions and the output, nothing else: own weights, own attention with explicit
masks, own rounds. Equality shows ragged tables, tail append, truncation and the refresh with true K/V right together,
which identical output cannot: a wrong draft cache would only cost speed.

As long as a drafter is right its drafts are the output itself, so a round is predicted by feeding it the output. A
round depends on where it starts and on nothing before: what follows the context is verified KV by then. Rounds of all
draft lengths are therefore made of the same pieces, which are computed once (``Rounds``), and those of many requests at
once (``run``): a forward over a few tokens takes the time of reading the weights.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from compressors import Kept
from tests.packings import Packing

# logits [T, vocab], positions of their input tokens -> chosen tokens
Choose = Callable[[Tensor, Sequence[int]], list[int]]
PREFILL = 512  # tokens of a long context that go through the model at a time
PIECE = 4  # drafts of a round that go through the model at first; then as many as were right so far


@dataclass(frozen=True)
class Past:
    """Keys and values of tokens that are known, per layer ``[H, m, D]``, and which of them may be read, per layer bool
    ``[H, m]``, all unless given."""

    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()
    visible: Sequence[Tensor] | None = None

    @property
    def length(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    def then(self, other: "Past") -> "Past":
        """``other`` behind it. For what is visible everywhere."""
        if not self.keys:
            return other
        sides = ((self.keys, other.keys), (self.values, other.values))
        return Past(*([torch.cat(pair, 1) for pair in zip(*side, strict=True)] for side in sides))

    def part(self, start: int, stop: int) -> "Past":
        """A view. For what is visible everywhere."""
        return Past(*([x[:, start:stop] for x in side] for side in (self.keys, self.values)))

    def only(self, visible: Tensor) -> "Past":
        """A copy of the first tokens without those that no head sees: ``visible`` is bool ``[L, H, m]``, and heads that
        see fewer than others of their layer are filled up with tokens that they do not see."""
        keys, values, seen = [], [], []
        for key, value, of_layer in zip(self.keys, self.values, visible, strict=True):
            counts = of_layer.sum(-1)
            first = torch.sort(of_layer, dim=-1, descending=True, stable=True).indices[:, : int(counts.max())]
            index = first[..., None].expand(-1, -1, key.shape[-1])
            keys.append(key.gather(1, index))
            values.append(value.gather(1, index))
            seen.append(torch.arange(first.shape[1]) < counts[:, None])
        return Past(keys, values, seen)


class Row:
    """Tokens at ``start`` and what they see: ``pasts`` and ``own``, those of the same round that went through the model
    before."""

    def __init__(self, ids: Sequence[int], start: int, pasts: Sequence[Past], own: Past | None = None) -> None:
        self.ids, self.start, self.own = ids, start, own or Past()
        self.pasts = [past for past in pasts if past.length]
        self.keys: list[Tensor] = []  # per layer [H, m, D], of ``own`` and ``ids`` after the forward
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [Hq, T, D]``, ``key`` and ``value [H, T, D]`` -> ``[Hq, T, D]``."""
        heads, rows, dim = key.shape
        if self.own.keys:
            key, value = torch.cat([self.own.keys[layer], key], 1), torch.cat([self.own.values[layer], value], 1)
        self.keys.append(key)
        self.values.append(value)
        asked = query.reshape(heads, -1, dim) * scale  # [H, G * T, D]
        later = torch.ones(rows, key.shape[1], dtype=torch.bool).triu(1 + key.shape[1] - rows)
        logits = [asked @ past.keys[layer].transpose(1, 2) for past in self.pasts]
        for past, of_past in zip(self.pasts, logits, strict=True):
            if past.visible is not None:
                of_past.masked_fill_(~past.visible[layer][:, None], float("-inf"))
        mine = asked @ key.transpose(1, 2)
        logits.append(mine.masked_fill_(later.repeat(asked.shape[1] // rows, 1), float("-inf")))
        weights = torch.cat(logits, -1).softmax(-1).split([x.shape[-1] for x in logits], -1)
        stored = [*(past.values[layer] for past in self.pasts), value]
        out = sum((w @ v for w, v in zip(weights, stored, strict=True)), torch.zeros(()))
        return out.view(query.shape)


class Reference:
    """The bundled model with an attention whose past can be masked per (layer, KV head)."""

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register("vericache_reference", self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="vericache_reference"
        ).eval()
        self._rows: Sequence[Row] = ()

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        parts = zip(*(x[0].split([len(r.ids) for r in self._rows], 1) for x in (query, key, value)), strict=True)
        out = [r.attend(module.layer_idx, q, k, v, scaling) for r, (q, k, v) in zip(self._rows, parts, strict=True)]
        return torch.cat(out, 1).transpose(0, 1)[None], None

    @torch.no_grad()
    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Logits ``[T, vocab]`` of each row."""
        self._rows = rows
        ids = torch.tensor([[i for row in rows for i in row.ids]])
        positions = torch.cat([torch.arange(row.start, row.start + len(row.ids)) for row in rows])[None]
        logits = self.model(ids, position_ids=positions, use_cache=False).logits[0]
        return list(logits.split([len(row.ids) for row in rows]))

    def full(self, ids: Sequence[int], past: Past | None = None) -> Past:
        """The KV of ``past`` and ``ids`` behind it."""
        past = past or Past()
        for start in range(0, len(ids), PREFILL):
            row = Row(ids[start : start + PREFILL], past.length, [past])
            self.forward([row])
            past = past.then(Past(row.keys, row.values))
        return past

    def predict(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        kept: Kept,
        drafted: Sequence[int],
        choose: Choose,
        packing: Packing | None = None,
    ) -> list[int]:
        """Accepted drafts of each round that drafted ``drafted[i]`` tokens. A round whose verify lies beyond the
        output (the request ended inside it) counts what the output still shows. ``packing``: what the draft cache's
        format loses."""
        full = self.full([*prompt, *output[:-1]])
        rounds = Rounds([*prompt, *output], len(prompt), full, kept, choose, packing)
        return run(self, [(rounds, rounds.walk(drafted))])[0]


@dataclass
class _Start:
    """What is known of rounds from one token on: drafts that match, their KV, and whether the next draft is wrong."""

    own: Past
    matches: int = 0
    over: bool = False


class Rounds:
    """The rounds of one output on one compressed context.

    Args:
        tokens: prompt and output, the first ``context`` of them the prompt.
        full: KV of all tokens but the last one.
        kept: positions of the context that the drafter may read.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        context: int,
        full: Past,
        kept: Kept,
        choose: Choose,
        packing: Packing | None = None,
    ) -> None:
        self._tokens, self._context, self._full = tokens, context, full
        self._choose, self._packing = choose, packing
        visible = visible_positions(kept, context)
        self._rough = packed(packing, full, visible) if packing is not None else full
        self._kept = self._rough.only(visible)
        self._starts: dict[int, _Start] = {}

    def walk(self, drafted: Iterable[int], whole: bool = False) -> Generator[int, None, list[int]]:
        """The accepted drafts of rounds that draft ``drafted[i]`` tokens, one after the other; of those the output
        shows to their last draft, if ``whole``. Yields the start of the piece it needs to go on (see ``run``)."""
        n, accepted = self._context, []
        for drafts in drafted:  # 0: a verify without drafts, one token of plain decoding over reloaded KV
            if whole and n + drafts >= len(self._tokens):
                break
            while (found := self._accepted(n, drafts)) is None:
                yield n
            accepted.append(found)
            n += found + 1
        return accepted

    def whole(self, drafts: int) -> Generator[int, None, list[int]]:
        """All rounds of ``drafts`` tokens that the output shows to their last draft."""
        return self.walk(repeat(drafts), whole=True)

    def _accepted(self, start: int, drafts: int) -> int | None:
        """Of a round that drafts behind token ``start``, as far as the output shows; None if not known yet."""
        found = self._starts.setdefault(start, _Start(Past()))
        shown = len(self._tokens) - start - 1
        known = found.over or found.matches >= min(drafts, shown)
        return min(found.matches, drafts) if known else None

    def piece(self, start: int) -> Row:
        """The next inputs of a round from ``start`` on, as far as the output shows what follows them."""
        found = self._starts[start]
        at = start + found.matches
        stop = min(at + max(PIECE, found.matches), len(self._tokens) - 1)
        return Row(self._tokens[at:stop], at, self.pasts(start), found.own)

    def learn(self, start: int, row: Row, logits: Tensor) -> None:
        """What the forward over ``piece(start)`` gave."""
        chosen = self._choose(logits, range(row.start, row.start + len(row.ids)))
        known = self._tokens[row.start + 1 : row.start + 1 + len(row.ids)]
        right = next((i for i, (a, b) in enumerate(zip(chosen, known, strict=True)) if a != b), len(known))
        matches = self._starts[start].matches + right
        self._starts[start] = _Start(Past(row.keys, row.values), matches, right < len(known))

    def pasts(self, n: int) -> list[Past]:
        """The draft cache at a round's start: kept tokens of the context, and what is verified, exact or packed."""
        exact_from = self._packing.exact_from(self._context, n) if self._packing is not None else self._context
        return [self._kept, self._rough.part(self._context, exact_from), self._full.part(exact_from, n)]


Walk = tuple[Rounds, Generator[int, None, list[int]]]


def run(reference: Reference, walks: Sequence[Walk]) -> list[list[int]]:
    """What each walk returns; the pieces that they need at a time go through the model together."""
    results: list[list[int]] = [[] for _ in walks]
    waiting = list(range(len(walks)))
    while waiting:
        needed: dict[tuple[int, int], Rounds] = {}
        for i in list(waiting):
            rounds, walk = walks[i]
            try:
                needed[id(rounds), next(walk)] = rounds
            except StopIteration as end:
                results[i] = end.value
                waiting.remove(i)
        pieces = [(rounds, start, rounds.piece(start)) for (_, start), rounds in needed.items()]
        if pieces:
            logits = reference.forward([row for _, _, row in pieces])
            for (rounds, start, row), of_row in zip(pieces, logits, strict=True):
                rounds.learn(start, row, of_row)
    return results


def packed(packing: Packing, full: Past, visible: Tensor) -> Past:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(full.keys, full.values, strict=True)):
        cache.update(keys[None], values[None], layer)
    layers = packing.pack(cache, visible).layers
    return Past([layer.keys[0] for layer in layers], [layer.values[0] for layer in layers])


def visible_positions(kept: Kept, context: int) -> Tensor:
    """bool ``[L, H, context]``."""
    layers, heads = kept.counts.shape
    mask = torch.zeros(layers, heads, context, dtype=torch.bool)
    head = torch.repeat_interleave(torch.arange(layers * heads), kept.counts.flatten())
    mask.view(layers * heads, context)[head, kept.positions] = True
    return mask


def greedy(logits: Tensor, positions: Sequence[int]) -> list[int]:
    chosen: list[int] = logits.argmax(-1).tolist()
    return chosen
