"""The bundled model on full KV, for ``benchmarks.certified``: contexts with KVzip's scores, and the queries of decoding
steps behind them, recorded once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressors import METHODS, CachedTokens, Compressor, MethodSpec, Shape, create
from tests.reference import Past, Reference, Row
from vericache.demo import model

STEPS = 10
CHUNK = 512  # context tokens that a scoring row repeats: a row's logits are in memory at once


@dataclass(frozen=True)
class Context:
    """Of ``tokens``: the exact cache per layer ``[H, n, D]``, and KVzip's scores, float32 ``[L, H, n]``."""

    tokens: list[int]
    past: Past
    scores: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        layers, heads, n = self.scores.shape
        return layers, heads, n


@dataclass(frozen=True)
class Recorded:
    """Greedy decoding on full KV behind a context. ``queries`` ``[S, L, H, G, D]``, behind RoPE; ``keys``, ``values``
    ``[L, H, S, D]``: of the steps' own tokens, the first s + 1 of which step s sees."""

    context: Context
    queries: Tensor
    keys: Tensor
    values: Tensor


Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]  # layer, q [Hq, T, D], k, v [H, T, D], scale


class WatchedRow(Row):
    """``see`` gets what ``attend`` gets."""

    def __init__(self, ids: Sequence[int], past: Past, own: Past, see: Callable[..., None]) -> None:
        super().__init__(ids, past, own)
        self._see = see

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self._see(layer, query, key, scale)
        return super().attend(layer, query, key, value, scale)


class OwnRow(Row):
    """Tokens whose attention is ``compute``'s, behind ``start`` others."""

    def __init__(self, ids: Sequence[int], start: int, compute: Attend) -> None:
        super().__init__(ids, Past([], []), Past([], []))
        self._start, self._compute = start, compute

    @property
    def start(self) -> int:
        return self._start

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return self._compute(layer, query, key, value, scale)


class Model:
    """The bundled model in float32 with its tokenizer."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        folder = model.prepare()
        self.reference = Reference(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        config: Any = self.reference.model.config
        heads, queries = config.num_key_value_heads, config.num_attention_heads
        self.shape = Shape(config.num_hidden_layers, heads, queries, config.hidden_size // queries)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def spec(self, ratio: float, **changes: Any) -> MethodSpec:
        return MethodSpec("kvzip", "per_head", ratio, options=(("chunk", CHUNK),), **changes)

    def context(self, tokens: list[int]) -> Context:
        past = self.reference.full(tokens)
        spec = self.spec(0.25)
        compressor = create(spec, self.shape, len(tokens))
        texts = {key: self.encode(text) for key, text in {**METHODS["kvzip"].texts, "turn": "\n"}.items()}
        for index, probe in enumerate(METHODS["kvzip"].probes(tokens, spec, texts)):
            row = WatchedRow(probe.tokens, past, Past([], []), _observing(compressor, index, past))
            self.reference.forward([row])
        return Context(tokens, past, compressor.scorer.scores())

    def record(self, tokens: list[int], steps: int) -> Recorded:
        """The context ends before the last token, the first step's input."""
        context = self.context(tokens[:-1])
        seen: list[Tensor] = []
        own, queries, token = Past([], []), list[Tensor](), tokens[-1]
        for _ in range(steps):
            seen.clear()
            row = WatchedRow([token], context.past, own, lambda layer, query, *_: seen.append(query[:, 0]))
            token = int(self.reference.forward([row])[0][-1].argmax())
            queries.append(torch.stack(seen).unflatten(1, (self.shape.kv_heads, -1)))
            own = Past(row.keys, row.values)
        return Recorded(context, torch.stack(queries), torch.stack(list(own.keys)), torch.stack(list(own.values)))


def _observing(compressor: Compressor, index: int, past: Past) -> Callable[..., None]:
    def see(layer: int, query: Tensor, key: Tensor, scale: float) -> None:
        cached = CachedTokens(lambda at: past.keys[layer][:, at], lambda at: past.values[layer][:, at])
        compressor.observe(layer, index, query.transpose(0, 1), key.transpose(0, 1), cached, scale)

    return see


def thinned(prompt: Recorded, every: int) -> Recorded:
    """Layers every - 1, 2 every - 1, ..."""
    layers, past = slice(every - 1, None, every), prompt.context.past
    kept = Past(past.keys[layers], past.values[layers])
    context = Context(prompt.context.tokens, kept, prompt.context.scores[layers])
    return Recorded(context, prompt.queries[:, layers], prompt.keys[layers], prompt.values[layers])


def recorded(folder: Path, names: Sequence[str], every: int, loaded: Callable[[], Model]) -> dict[str, Recorded]:
    """Of the bundled prompts, ``STEPS`` steps each, from ``folder`` where they are there; of ``every`` so many layers
    one."""
    from vericache.demo.prompts import load

    found = {}
    for name in names:
        file = folder / f"{name}.pt"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (tokens,) = load([name], loaded().tokenizer).values()
            torch.save(loaded().record(tokens, STEPS), file)
        found[name] = thinned(torch.load(file, weights_only=False), every)
    return found
