"""Shared-noise sampling on vLLM's V1 sampler: every logits row is an ordinary row.

A verify row of ``1 + k`` tokens is expanded into ``1 + k`` virtual requests, the j-th with the history "output
so far + first j drafts", and all of them go through vLLM's own ``Sampler``: penalties, bias, bad words, min tokens,
min-p, top-k/p and logprobs need no code of ours. Random rows draw Gumbel noise keyed by (request seed, position,
token), the same for the draft and the verify row of a position, so a draft is accepted exactly when it equals the
verifier's own sample, and the output is what full-KV sampling with that seed gives. vLLM's ``RejectionSampler`` is
never called.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

PLACEHOLDER = -1  # vLLM's RejectionSampler.parse_output drops it


@dataclass(frozen=True)
class RequestRow:
    """One batch row: its user's parameters, prompt and output, the drafts its logits rows extend, and whether
    logprob tokens asked for by the user apply (not on draft rows, whose output nobody sees)."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    drafts: Sequence[int] = ()
    is_draft: bool = False


def row_seeds(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """int64 noise seeds in [0, 2**31): a 64-bit finaliser (SplitMix64) over (seed, position)."""
    with np.errstate(over="ignore"):
        x = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
        for word in (np.zeros(len(x), np.uint64), np.asarray(positions).astype(np.uint64)):
            x = (x ^ word) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(33)).astype(np.int64))


class KeyedTopKTopP(nn.Module):
    """In place of vLLM's ``TopKTopPSampler``: the same masks and the same CPU op
    (``fused_gumbel_argmax``, per-token SplitMix64 noise), but with the seeds of ``row_seeds``."""

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode
        self.seeds = torch.empty(0, dtype=torch.int64)

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = apply_top_k_top_p(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), self.seeds), processed


def expand(metadata: SamplingMetadata, rows: Sequence[RequestRow], vocab_size: int) -> SamplingMetadata:
    """Sampling metadata with one entry per logits row: row i of the batch becomes ``1 + len(drafts)`` rows."""
    width = [1 + len(row.drafts) for row in rows]
    repeat = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(width))
    owners = [row for row, w in zip(rows, width, strict=True) for _ in range(w)]
    drafts = [list(row.drafts[:j]) for row in rows for j in range(1 + len(row.drafts))]
    outputs = [[*row.output, *extra] for row, extra in zip(owners, drafts, strict=True)]
    bad_words = {i: o.params.bad_words_token_ids for i, o in enumerate(owners) if o.params.bad_words_token_ids}
    logprob_tokens = {
        i: o.params.logprob_token_ids
        for i, o in enumerate(owners)
        if o.params.logprob_token_ids is not None and not o.is_draft
    }

    def each(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[repeat]

    return replace(
        metadata,
        temperature=each(metadata.temperature),
        top_p=each(metadata.top_p),
        top_k=each(metadata.top_k),
        generators={},
        prompt_token_ids=None if metadata.no_penalties else _padded([o.prompt for o in owners], vocab_size),
        frequency_penalties=each(metadata.frequency_penalties),
        presence_penalties=each(metadata.presence_penalties),
        repetition_penalties=each(metadata.repetition_penalties),
        output_token_ids=outputs,
        spec_token_ids=None,
        allowed_token_ids_mask=each(metadata.allowed_token_ids_mask),
        bad_words_token_ids=bad_words,
        logitsprocs=_processors(owners, outputs),
        logprob_token_ids=logprob_tokens or None,
    )


def _padded(prompts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """int64 ``[rows, longest]``, padded with ``vocab_size`` as vLLM's ``InputBatch`` does."""
    out = torch.full((len(prompts), max(map(len, prompts))), vocab_size, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        out[i, : len(prompt)] = torch.tensor(prompt)
    return out


def _processors(owners: Sequence[RequestRow], outputs: Sequence[list[int]]) -> LogitsProcessors:
    """vLLM's built-in processors (bias, min tokens, min-p), which are keyed by batch index, over the logits rows."""
    if not any(o.params.logit_bias or o.params.min_tokens or o.params.min_p for o in owners):
        return LogitsProcessors()
    # The constructors read the number of rows from the configuration and nothing else.
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(owners)))
    processors = LogitsProcessors(p(config, torch.device("cpu"), False) for p in BUILTIN_LOGITS_PROCESSORS)
    added = [(i, o.params, list(o.prompt), out) for i, (o, out) in enumerate(zip(owners, outputs, strict=True))]
    update = BatchUpdate(batch_size=len(owners), removed=[], added=added, moved=[])
    for processor in processors.all:
        processor.update_state(update)
    return processors


def sample(
    sampler: Sampler,
    logits: Tensor,
    metadata: SamplingMetadata,
    rows: Sequence[RequestRow],
    positions: Sequence[int],
    vocab_size: int,
) -> SamplerOutput:
    """Sample every logits row and keep, per batch row, the drafts that equal the samples and one token more.

    Args:
        logits: ``[N, vocab]`` with ``N = sum(1 + len(row.drafts))``, rows in batch order.
        positions: true position of each logits row's input token.

    Returns:
        ``sampled_token_ids`` int32 ``[R, 1 + longest draft]``, rejected places filled with -1.
    """
    if not isinstance(sampler.topk_topp_sampler, KeyedTopKTopP):
        sampler.topk_topp_sampler = KeyedTopKTopP(sampler.logprobs_mode)
    seeds = [row.params.seed or 0 for row in rows for _ in range(1 + len(row.drafts))]
    sampler.topk_topp_sampler.seeds = row_seeds(seeds, positions)
    output = sampler(logits=logits, sampling_metadata=expand(metadata, rows, vocab_size))
    if not any(row.drafts for row in rows):
        return output
    return accept(output, [list(row.drafts) for row in rows])


def accept(output: SamplerOutput, drafts: Sequence[Sequence[int]]) -> SamplerOutput:
    """Fold the samples of expanded rows back into batch rows: the leading drafts that equal the samples, and the
    sample after them (correction or bonus)."""
    samples = output.sampled_token_ids.flatten().tolist()
    width = 1 + max(map(len, drafts))
    tokens = torch.full((len(drafts), width), PLACEHOLDER, dtype=torch.int32)
    source = torch.zeros(len(drafts), width, dtype=torch.int64)  # logits row behind each place
    start = 0
    for i, draft in enumerate(drafts):
        mine = samples[start : start + len(draft) + 1]
        kept = accepted(draft, mine) + 1
        tokens[i, :kept] = torch.tensor(mine[:kept], dtype=torch.int32)
        source[i] = torch.arange(start, start + width).clamp(max=start + len(draft))
        start += len(draft) + 1
    logprobs = output.logprobs_tensors
    if logprobs is not None:
        flat = source.flatten()
        logprobs = LogprobsTensors(
            logprobs.logprob_token_ids[flat], logprobs.logprobs[flat], logprobs.selected_token_ranks[flat]
        )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def accepted(draft: Sequence[int], samples: Sequence[int]) -> int:
    """Leading drafts that equal the verifier's own samples."""
    for i, token in enumerate(draft):
        if samples[i] != token:
            return i
    return len(draft)
