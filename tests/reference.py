"""An independent prediction of every round's accepted length: a Hugging Face forward in float32, teacher-forced.

Shares with the engine the kept positions and the output, nothing else: own weights, own attention with explicit
masks, own rounds. Equality shows ragged tables, tail append, truncation and the refresh with true K/V right together,
which identical output cannot: a wrong draft cache would only cost speed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from compressors import Kept
from tests.packings import Packing

# logits [T, vocab], positions of their input tokens -> chosen tokens
Choose = Callable[[Tensor, Sequence[int]], list[int]]


class Reference:
    """The bundled model with an attention whose keys can be masked per (layer, KV head)."""

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register("vericache_reference", self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="vericache_reference"
        ).eval()
        self._visible: Tensor | None = None  # bool [L, H, past]: keys of the past that may be read
        self.seen: Callable[[int, Tensor, Tensor], None] | None = None  # (layer, query, key) of every forward

    def _attention(self, module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        layer = module.layer_idx
        if self.seen is not None:
            self.seen(layer, query[0], key[0])
        heads, total, rows = key.shape[1], key.shape[2], query.shape[2]
        past = total - rows
        mask = torch.zeros(heads, rows, total)
        if self._visible is not None:
            mask[:, :, :past].masked_fill_(~self._visible[layer][:, None], float("-inf"))
        mask[:, :, past:] += torch.full((rows, rows), float("-inf")).triu(1)
        group = query.shape[1] // heads
        logits = query[0] @ key[0].repeat_interleave(group, 0).transpose(1, 2) * scaling
        weights = (logits + mask.repeat_interleave(group, 0)).softmax(-1)
        return (weights @ value[0].repeat_interleave(group, 0)).transpose(0, 1)[None], None

    @torch.no_grad()
    def forward(self, ids: Sequence[int], cache: DynamicCache | None = None, visible: Tensor | None = None) -> Tensor:
        """Logits ``[T, vocab]`` of ``ids`` behind ``cache`` (which grows)."""
        self._visible = visible
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        position = torch.arange(cache.get_seq_length(), cache.get_seq_length() + len(ids))[None]
        out = self.model(torch.tensor([list(ids)]), position_ids=position, past_key_values=cache, use_cache=True)
        self._visible = None
        return out.logits[0]

    def predict(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        kept: Kept,
        drafted: Sequence[int],
        choose: Choose,
        packing: Packing | None = None,
    ):
        """Accepted drafts of each round that drafted ``drafted[i]`` tokens. A round whose verify lies beyond the
        output (the request ended inside it) counts what the output still shows. ``packing``: what the draft cache's
        format loses."""
        tokens, base = [*prompt, *output], len(prompt)
        full = DynamicCache(config=self.model.config)
        self.forward(tokens[:-1], full)
        mask = visible_positions(kept, base)
        lossy = packing.pack(full, mask) if packing is not None else full
        n, accepted = base, []
        for count in drafted:
            chunk = tokens[n : n + count]
            if not chunk:  # a verify without drafts: one token of plain decoding over reloaded KV
                accepted.append(0)
                n += 1
                continue
            past = DynamicCache(config=self.model.config)
            exact_from = packing.exact_from(base, n) if packing is not None else 0
            for layer, (rough, exact) in enumerate(zip(lossy.layers, full.layers, strict=True)):
                parts = [(rough.keys, exact.keys), (rough.values, exact.values)]
                kv = [torch.cat([a[:, :, :exact_from], b[:, :, exact_from:n]], 2) for a, b in parts]
                past.update(*kv, layer)
            tail = torch.ones(*mask.shape[:2], n - base, dtype=torch.bool)
            logits = self.forward(chunk, past, torch.cat([mask, tail], -1))
            chosen = choose(logits, range(n, n + len(chunk)))
            known = tokens[n + 1 : n + 1 + len(chunk)]
            shown = min(len(chunk), len(known))
            a = next((i for i in range(shown) if chosen[i] != known[i]), shown)
            accepted.append(a)
            n += a + 1
        return accepted


def visible_positions(kept: Kept, context: int) -> Tensor:
    """bool ``[L, H, context]``."""
    layers, heads = kept.counts.shape
    mask = torch.zeros(layers, heads, context, dtype=torch.bool)
    head = torch.repeat_interleave(torch.arange(layers * heads), kept.counts.flatten())
    mask.view(layers * heads, context)[head, kept.positions] = True
    return mask


def greedy(logits: Tensor, positions: Sequence[int]) -> list[int]:
    return logits.argmax(-1).tolist()
