"""The engines behind ``benchmarks.lossless``: baselines, one cell, the near-tie proof."""

import argparse
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from vllm import SamplingParams

from benchmarks.engine import LiveEngine, summaries, tokens
from benchmarks.report import machine
from vericache.demo import model, prompts
from vericache.demo.worker import Job, run_in_process

if TYPE_CHECKING:
    from benchmarks.lossless import Cell


class Run:
    """One engine for all cells; baselines are made once per (temperature, concurrency)."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.folder = model.prepare()
        longest = args.prompt_tokens + args.tokens + 200
        self.engine_arguments: dict[str, Any] = {
            "dtype": args.dtype,
            "max_model_len": max(1024, -(-longest // 256) * 256),
            "enforce_eager": True,
            "block_size": 32,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1536,
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": True,
        }
        self.engine = LiveEngine(
            self.folder, self.engine_arguments, {"min_prompt_tokens": 360, "draft_length": args.draft_length}
        )
        names = list(prompts.PROMPTS)[: args.prompts]
        self.prompts = prompts.load(names, self.engine.tokenizer, args.prompt_tokens)
        self._baselines: dict[tuple[float, int], list[list[int]]] = {}
        self._judges: dict[torch.dtype, Any] = {}

    @cached_property
    def header(self) -> dict[str, Any]:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.args).items() if k != "shard"}
        exact = self.args.dtype == "float32"
        return {
            "machine": f"{machine()}, {self.args.threads} thread(s), torch {torch.__version__}",
            "model": model.NAME,
            "options": options,
            "prompts": {n: len(p) for n, p in self.prompts.items()},
            **({} if exact else {"noise": self._noise, "plain_against_itself": self.plain_against_itself()}),
        }

    def cell(self, cell: "Cell") -> dict[str, Any]:
        base = self.baseline(cell.temperature, cell.concurrency)
        self.engine.configure(compressor=cell.compressor, counts=cell.counts, ratio=cell.ratio, policy=cell.policy)
        ours: list[list[int]] = []
        reports: list[dict[str, Any]] = []
        for batch in self._batches(cell.concurrency):
            outputs = self.engine.generate(batch, self._params(cell.temperature, len(ours), len(batch)))
            ours += tokens(outputs)
            reports += summaries(outputs)
        divergences = [
            self._divergence(name, a, b) for name, a, b in zip(self.prompts, ours, base, strict=True) if a != b
        ]
        resident = [r["reason"] for r in reports if r["mode"] != "draft"]
        rounds = [a for r in reports for a in r["accepted_per_round"]]
        return {
            "requests": len(ours),
            "identical": len(ours) - len(divergences),
            "divergences": divergences,
            "passed": all(d["near_tie"] for d in divergences) and not resident,
            "resident": resident,
            "rounds": len(rounds),
            "accepted_per_round": round(sum(rounds) / max(1, len(rounds)), 2),
            "acceptance_length": round(1 + sum(rounds) / max(1, len(rounds)), 2),
            "compressed_fraction": round(sum(r["compressed_fraction"] for r in reports) / len(reports), 4),
        }

    def baseline(self, temperature: float, concurrency: int) -> list[list[int]]:
        if temperature == 0:
            return self.stock(self.engine_arguments["max_num_seqs"])
        key = (temperature, concurrency)
        if key not in self._baselines:
            out: list[list[int]] = []
            for batch in self._batches(concurrency):
                out += self.engine.plain(batch, self._params(temperature, len(out), len(batch)))
            self._baselines[key] = out
        return self._baselines[key]

    def stock(self, at_once: int) -> list[list[int]]:
        """Stock vLLM, greedy, in its own process, ``at_once`` requests at a time."""
        if (0.0, at_once) not in self._baselines:
            engine = {**self.engine_arguments, "max_num_seqs": at_once}
            job = Job(
                str(self.folder), self.prompts, self.args.tokens, engine, ignore_eos=True, threads=self.args.threads
            )
            self._baselines[0.0, at_once] = list(run_in_process(job).tokens.values())
        return self._baselines[0.0, at_once]

    def plain_against_itself(self) -> dict[str, Any]:
        """How often stock vLLM differs from itself: one request at a time against all at once."""
        alone, together = self.stock(1), self.stock(self.engine_arguments["max_num_seqs"])
        pairs = zip(self.prompts, alone, together, strict=True)
        divergences = [self._divergence(name, a, b) for name, a, b in pairs if a != b]
        return {"requests": len(alone), "identical": len(alone) - len(divergences), "divergences": divergences}

    def _batches(self, size: int) -> list[list[list[int]]]:
        every = list(self.prompts.values())
        return [every[i : i + size] for i in range(0, len(every), size)]

    def _params(self, temperature: float, first: int, count: int) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=temperature,
                seed=1000 + first + i if temperature else None,
                max_tokens=self.args.tokens,
                ignore_eos=True,
            )
            for i in range(count)
        ]

    def _divergence(self, name: str, ours: Sequence[int], base: Sequence[int]) -> dict[str, Any]:
        """The first different token, judged by teacher-forced full-KV logits in float32."""
        at = next(i for i, (a, b) in enumerate(zip(ours, base, strict=False)) if a != b)
        logits = self._logits([*self.prompts[name], *ours[:at]], torch.float32)[-1]
        a, b = float(logits[ours[at]]), float(logits[base[at]])
        behind = float(logits.max()) - min(a, b)
        ranks = [int((logits > x).sum()) for x in (a, b)]
        exact = self.args.dtype == "float32"
        return {
            "prompt": name,
            "at": at,
            "tokens": [ours[at], base[at]],
            "logits": [round(a, 4), round(b, 4)],
            "rank": ranks,
            "gap": round(behind, 5),
            "near_tie": not exact and behind <= self._noise["max"],
        }

    @cached_property
    def _noise(self) -> dict[str, Any]:
        """By how much the dtype moves the difference between the best two logits, over stock vLLM's outputs."""
        moved = []
        for prompt, output in zip(self.prompts.values(), self.stock(1), strict=True):
            ids = [*prompt, *output[:-1]]
            exact = self._logits(ids, torch.float32)[len(prompt) - 1 :]
            rough = self._logits(ids, getattr(torch, self.args.dtype))[len(prompt) - 1 :]
            best = exact.topk(2).indices
            pairs = (exact.gather(1, best), rough.gather(1, best))
            moved += ((pairs[0][:, 0] - pairs[0][:, 1]) - (pairs[1][:, 0] - pairs[1][:, 1])).abs().tolist()
        return {"median": round(median(moved), 4), "max": round(max(moved), 4), "positions": len(moved)}

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Teacher-forced, float32 ``[len(ids), vocab]``, by transformers."""
        if dtype not in self._judges:
            from transformers import AutoModelForCausalLM

            self._judges[dtype] = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()
        return self._judges[dtype](torch.tensor([list(ids)])).logits[0].float()
