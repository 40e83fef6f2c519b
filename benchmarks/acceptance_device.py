"""``benchmarks.acceptance`` without an engine: the reference model scores, decodes and verifies on any device, so that
a grid which takes days on two cores is measured on a GPU. Scorers see what the engine shows them (queries and keys of
their rows, keys and values of the context), in float32; what scoring costs in the engine is not measured here."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.acceptance_rounds import Predicted, Refused
from benchmarks.batched_reference import BatchedReference
from benchmarks.scoring import score
from compressors import METHODS, Kept, MethodError, MethodSpec, Rotary, Shape, create
from tests.reference import Choose, Past, Row, greedy
from vericache.demo.prompts import PROMPTS, load
from vericache.engine.texts import turn_text

ROW_TOKENS = 1024  # of a scoring row at most: its logits are in memory at once


class DeviceRun(Predicted):
    """On torch's default device."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        super().__init__(BatchedReference(folder), load(args.prompts, self.tokenizer), args)
        self.reference.model.to(torch.get_default_device())

    # -- what full KV says -----------------------------------------------------------------------------------------

    def outputs(self, temperature: float) -> dict[str, list[int]]:
        if temperature not in self._outputs:
            self._outputs[temperature] = self._decoded(temperature)
        return self._outputs[temperature]

    def _decoded(self, temperature: float) -> dict[str, list[int]]:
        """All prompts at once, token by token."""
        found: dict[str, list[int]] = {name: [] for name in self.prompts}
        pasts = {name: self._prompt_kv(name).part(0, len(ids) - 1) for name, ids in self.prompts.items()}
        own = {name: Past() for name in self.prompts}
        choose = {name: self.chooser(temperature, 1 + list(PROMPTS).index(name)) for name in self.prompts}
        for _ in range(self.length):
            rows = {
                name: Row([(ids + found[name])[-1]], len(ids) - 1 + len(found[name]), [pasts[name]], own[name])
                for name, ids in self.prompts.items()
            }
            for (name, row), logits in zip(rows.items(), self.reference.forward(list(rows.values())), strict=True):
                found[name] += choose[name](logits, [row.start])
                own[name] = Past(row.keys, row.values)
        return found

    def chooser(self, temperature: float, seed: int) -> Choose:
        """The best token, or the best with Gumbel noise of (seed, position), as the engine has it; other noise."""

        def sampled(logits: Tensor, positions: Sequence[int]) -> list[int]:
            noise = torch.stack([gumbel(logits.shape[-1], seed, at) for at in positions])
            chosen: list[int] = (logits / temperature + noise).argmax(-1).tolist()
            return chosen

        return sampled if temperature else greedy

    # -- what a method keeps ---------------------------------------------------------------------------------------

    def compressed(self, spec: MethodSpec) -> Iterator[tuple[str, Kept, float | None]]:
        for name in self.prompts:
            yield name, self._kept(name, spec), None

    def _kept(self, name: str, spec: MethodSpec) -> Kept:
        ids, past, method = self.prompts[name], self._prompt_kv(name), METHODS[spec.name]
        try:
            spec = method.fit(spec, ROW_TOKENS)
            compressor = create(spec, self._shape(), len(ids))
        except MethodError as error:
            raise Refused(str(error)) from None
        told = {**method.texts, "turn": turn_text(self.tokenizer)}
        texts = {key: self.tokenizer.encode(text, add_special_tokens=False) for key, text in told.items()}
        score(self.reference, compressor, ids, past, texts)
        return compressor.select()

    def _shape(self) -> Shape:
        config: Any = self.reference.model.config
        heads = config.num_key_value_heads, config.num_attention_heads
        tokens = max(len(ids) for ids in self.prompts.values()) + ROW_TOKENS
        return Shape(config.num_hidden_layers, *heads, self.head_dim, self._rotary(tokens))

    def _rotary(self, tokens: int) -> Rotary:
        """The model's own table, from the module that it computes its angles with."""
        x = torch.zeros(1, 1)
        cos, sin = self.reference.model.model.rotary_emb(x, torch.arange(tokens)[None])
        half = cos.shape[-1] // 2
        return Rotary(torch.cat([cos[0, :, :half], sin[0, :, :half]], -1), neox=True)


def gumbel(size: int, seed: int, position: int) -> Tensor:
    """float32 ``[size]``, the same at every call with this seed and position."""
    device = torch.get_default_device()
    rng = torch.Generator(device).manual_seed(seed << 32 | position)
    return -torch.empty(size, device=device).exponential_(generator=rng).log()
