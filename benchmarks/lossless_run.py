"""The engines behind ``benchmarks.lossless``: baselines, one cell, the near-tie proof."""

import argparse
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from vllm import SamplingParams

from benchmarks.engine import LiveEngine, summaries, tokens
from vericache.demo import model, prompts
from vericache.demo.worker import Job, run_in_process

if TYPE_CHECKING:
    from benchmarks.lossless import Cell

# Two tokens tie when their float32 logits differ by less than this share of the larger one. bfloat16 keeps 8 bits
# (2**-8 = 0.4 %) per operation; a forward pass accumulates a few of them.
TIE = {"float32": 2.0**-20, "bfloat16": 2.0**-6}


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
            "kv_cache_memory_bytes": 3 << 30,
            "enable_prefix_caching": True,
        }
        self.engine = LiveEngine(
            self.folder, self.engine_arguments, {"min_prompt_tokens": 360, "draft_length": args.draft_length}
        )
        names = list(prompts.PROMPTS)[: args.prompts]
        self.prompts = prompts.load(names, self.engine.tokenizer, args.prompt_tokens)
        self._baselines: dict[tuple[float, int], list[list[int]]] = {}
        self._judge: Any = None

    def header(self) -> dict[str, Any]:
        return {
            "model": model.NAME,
            "machine": f"{platform.processor() or platform.machine()}, {self.args.threads} thread(s), CPU",
            "torch": torch.__version__,
            "prompts": {n: len(p) for n, p in self.prompts.items()},
            **({} if self.args.dtype == "float32" else {"plain_against_itself": self.plain_against_itself()}),
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
        rounds = [a for r in reports for a in r["accepted_per_round"]]
        return {
            "requests": len(ours),
            "identical": len(ours) - len(divergences),
            "divergences": divergences,
            "passed": all(d["near_tie"] for d in divergences) and all(r["mode"] == "draft" for r in reports),
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
        logits = self._logits([*self.prompts[name], *ours[:at]])
        a, b = float(logits[ours[at]]), float(logits[base[at]])
        gap, scale = abs(a - b), max(abs(a), abs(b))
        return {
            "prompt": name,
            "at": at,
            "tokens": [ours[at], base[at]],
            "logits": [round(a, 4), round(b, 4)],
            "rank": sorted(int((logits > x).sum()) for x in (a, b)),
            "gap": round(gap, 5),
            "near_tie": gap <= TIE[self.args.dtype] * scale,
        }

    @torch.no_grad()
    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        if self._judge is None:
            from transformers import AutoModelForCausalLM

            self._judge = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        return self._judge(torch.tensor([list(ids)])).logits[0, -1]
