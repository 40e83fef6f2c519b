"""Streams in vLLM's own steps: one token per output.

A round delivers many tokens in one output, and a slow reader gets several outputs merged
(``RequestOutputCollector.put``). vLLM's tool-call and reasoning parsers are written for deltas of one token; some lose
arguments in longer ones (xlam, granite-20b-fc). Where a server has such a parser, every streamed output is cut into
one per token, each with the text that vLLM's own detokenizer gives to it.
"""

import logging
from collections.abc import AsyncIterator
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

logger = logging.getLogger("vllm.vericache.deltas")  # under vLLM's handler


def stream_token_by_token(engine_client: Any) -> None:
    """From now on ``engine_client.generate`` yields streamed outputs (``RequestOutputKind.DELTA``) by token."""
    generate = engine_client.generate

    @wraps(generate)
    async def by_token(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        streamed = isinstance(sampling_params, SamplingParams)
        streamed = streamed and sampling_params.output_kind is RequestOutputKind.DELTA
        cutter = TokenByToken(engine_client.get_tokenizer(), sampling_params) if streamed else None
        async for output in generate(prompt, sampling_params, request_id, **kwargs):
            for single in cutter.split(output) if cutter else [output]:
                yield single

    engine_client.generate = by_token


class TokenByToken:
    """One streamed request; one detokenizer for each of its sequences."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    def split(self, output: RequestOutput) -> list[RequestOutput]:
        """Outputs of at most one token each that add up to ``output``; what ends a sequence is in its last one."""
        pieces = [self._sequence(output.prompt_token_ids, sequence) for sequence in output.outputs]
        parts = []
        for sequence in (s for piece in pieces for s in piece):
            part = copy(output)
            part.outputs, part.finished = [sequence], False
            parts.append(part)
        if not parts:
            return [output]
        parts[-1].finished = output.finished
        for part in parts[1:]:  # LogprobsProcessor.pop_prompt_logprobs: once per request
            part.prompt_logprobs, part.prompt_token_id_logprobs = None, None
        for part in parts[:-1]:
            part.kv_transfer_params = None
        return parts

    def _sequence(self, prompt: list[int] | None, whole: CompletionOutput) -> list[CompletionOutput]:
        if not whole.token_ids:
            return [whole]
        if whole.index not in self._detokenizers:
            self._detokenizers[whole.index] = self._detokenizer(prompt)
        detokenizer, last = self._detokenizers[whole.index], len(whole.token_ids) - 1
        # As OutputProcessor.process_outputs calls it: a stop token is not text; a stop string is found in the text.
        ended = whole.finish_reason == "stop" and not isinstance(whole.stop_reason, str)
        parts = []
        for i, token in enumerate(whole.token_ids):
            detokenizer.update([token], ended and i == last)
            text = detokenizer.get_next_output_text(whole.finished() and i == last, delta=True)
            logprobs = whole.logprobs[i : i + 1] if whole.logprobs else whole.logprobs
            if i == last:
                parts.append(replace(whole, text=text, token_ids=[token], logprobs=logprobs))
            else:
                parts.append(CompletionOutput(whole.index, text, [token], whole.cumulative_logprob, logprobs))
        if "".join(part.text for part in parts) != whole.text:
            logger.error("sequence %s: %r is not the text of its tokens; it is not cut", whole.index, whole.text)
            return [whole]
        return parts

    def _detokenizer(self, prompt: list[int] | None) -> IncrementalDetokenizer:
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=self._params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return IncrementalDetokenizer.from_new_request(self._tokenizer, request)
