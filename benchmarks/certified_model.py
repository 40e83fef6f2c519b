"""The bundled model on full KV, for ``benchmarks.certified``: contexts with KVzip's scores, and the queries of decoding
steps behind them, recorded once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.batched_reference import Together
from benchmarks.scoring import WatchedRow, score
from compressors import METHODS, MethodSpec, Shape, create
from tests.reference import Past
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


class Model:
    """The bundled model, or that in ``folder``, in float32 with its tokenizer, on torch's default device."""

    def __init__(self, folder: Path | None = None) -> None:
        from transformers import AutoTokenizer

        folder = folder or model.prepare()
        device = torch.get_default_device()
        with torch.device("cpu"):
            self.reference = Together(folder)
        self.reference.model.to(device)
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
        score(self.reference, compressor, tokens, past, texts)
        return Context(tokens, past, compressor.scorer.scores())

    def record(self, tokens: list[int], steps: int) -> Recorded:
        """The context ends before the last token, the first step's input."""
        context = self.context(tokens[:-1])
        seen: list[Tensor] = []
        own, queries, token = Past(), list[Tensor](), tokens[-1]
        for _ in range(steps):
            seen.clear()
            row = WatchedRow([token], context.past, lambda layer, query, *_: seen.append(query[:, 0]), own)
            token = int(self.reference.forward([row])[0][-1].argmax())
            queries.append(torch.stack(seen).unflatten(1, (self.shape.kv_heads, -1)))
            own = Past(row.keys, row.values)
        return Recorded(context, torch.stack(queries), torch.stack(list(own.keys)), torch.stack(list(own.values)))


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
            folder.mkdir(parents=True, exist_ok=True)  # of one process: half a file would be read by another
            (tokens,) = load([name], loaded().tokenizer).values()
            torch.save(loaded().record(tokens, STEPS), file)
        found[name] = thinned(torch.load(file, weights_only=False, map_location=torch.get_default_device()), every)
    return found
