"""vLLM's own side of a sampling test: parameters and batch metadata, built without the code under test."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vericache.engine.sampling import RequestRow

VOCAB = 32


def params_of(seed: int | None = 11, bad_words: Sequence[Sequence[int]] = (), **values: Any) -> SamplingParams:
    params = SamplingParams(seed=seed, max_tokens=100, **values)
    if bad_words:
        params._bad_words_token_ids = [list(word) for word in bad_words]  # as the tokenizer would set them
    return params


def metadata_of(rows: Sequence[RequestRow], vocab: int = VOCAB) -> SamplingMetadata:
    """As ``InputBatch._make_sampling_metadata`` fills it for a batch of these requests, drafts left out."""
    params = [row.params for row in rows]
    greedy = [p.temperature < 1e-5 for p in params]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    penalised = any(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 for p in params)
    prompts = torch.full((len(rows), max(len(row.prompt) for row in rows)), vocab, dtype=torch.int64)
    for i, row in enumerate(rows):
        prompts[i, : len(row.prompt)] = torch.tensor(row.prompt)
    bad_words = {i: p.bad_words_token_ids for i, p in enumerate(params) if p.bad_words_token_ids}
    wanted = {i: p.logprob_token_ids for i, p in enumerate(params) if p.logprob_token_ids is not None}
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    allowed = None
    if any(p.allowed_token_ids for p in params):
        allowed = torch.zeros(len(rows), vocab, dtype=torch.bool)
        for i, p in enumerate(params):
            if p.allowed_token_ids:
                allowed[i] = True
                allowed[i, p.allowed_token_ids] = False
    return SamplingMetadata(
        temperature=None if all(greedy) else torch.tensor([p.temperature for p in params]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=torch.tensor([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None,
        top_k=torch.tensor(top_k, dtype=torch.int32) if any(k < vocab for k in top_k) else None,
        generators={},
        max_num_logprobs=max(logprobs) if logprobs else None,
        no_penalties=not penalised,
        prompt_token_ids=prompts if penalised else None,
        frequency_penalties=torch.tensor([p.frequency_penalty for p in params]),
        presence_penalties=torch.tensor([p.presence_penalty for p in params]),
        repetition_penalties=torch.tensor([p.repetition_penalty for p in params]),
        output_token_ids=[list(row.output) for row in rows] if penalised or bad_words else [],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids=bad_words,
        logitsprocs=batch_processors(rows),
        logprob_token_ids=wanted or None,
        spec_token_ids=[[] for _ in rows],
    )


def batch_processors(rows: Sequence[RequestRow]) -> LogitsProcessors:
    """vLLM's processors as a runner keeps them: one entry per batch row."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(rows)), speculative_config=None)
    processors = LogitsProcessors(kind(config, torch.device("cpu"), False) for kind in BUILTIN_LOGITS_PROCESSORS)
    added = [(i, row.params, list(row.prompt), list(row.output)) for i, row in enumerate(rows)]
    for processor in processors.all:
        processor.update_state(BatchUpdate(batch_size=len(rows), removed=[], added=added, moved=[]))
    return processors
