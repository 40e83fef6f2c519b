"""Extra batch rows, written into a vLLM ``SchedulerOutput`` before it leaves the scheduler."""

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request


def shadow_params(params: SamplingParams) -> SamplingParams:
    """Parameters of a draft row: the user's, without what asks for output (nobody sees a draft row's)."""
    shadow = params.clone()
    shadow.logprobs = shadow.prompt_logprobs = shadow.logprob_token_ids = None
    return shadow


def add_new_row(
    so: SchedulerOutput,
    row_id: str,
    token_ids: list[int],
    computed: int,
    blocks: Sequence[int],
    params: SamplingParams,
    num_tokens: int = 1,
) -> None:
    """A row the worker has not seen: ``num_tokens`` tokens of ``token_ids`` from position ``computed`` on."""
    so.scheduled_new_reqs.append(
        NewRequestData(
            req_id=row_id,
            prompt_token_ids=token_ids,
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            block_ids=(list(blocks),),
            num_computed_tokens=computed,
            lora_request=None,
            prefill_token_ids=token_ids,
        )
    )
    _count(so, row_id, num_tokens)


def add_draft_row(so: SchedulerOutput, row_id: str, computed: int, drafted: int) -> None:
    """The next token of a row the worker knows; ``drafted`` drafts of the round exist."""
    cached = so.scheduled_cached_reqs
    cached.req_ids.append(row_id)
    cached.new_block_ids.append(None)
    cached.num_computed_tokens.append(computed)
    cached.num_output_tokens.append(drafted)
    _count(so, row_id, 1)


def add_verify_row(
    so: SchedulerOutput, request: Request, blocks: Sequence[int], drafts: list[int], with_tokens: bool
) -> None:
    """The request's own row over reloaded blocks. ``resumed`` makes the runner replace its block table: V1 by itself
    (``GPUModelRunner._update_states``, which wants all tokens again), V2 in our ``update_requests``."""
    cached = so.scheduled_cached_reqs
    request_id = request.request_id
    cached.req_ids.append(request_id)
    cached.resumed_req_ids.add(request_id)
    cached.new_block_ids.append((list(blocks),))
    if with_tokens:
        cached.all_token_ids[request_id] = request.all_token_ids.copy()
    cached.num_computed_tokens.append(request.num_computed_tokens)
    cached.num_output_tokens.append(request.num_output_tokens + request.num_output_placeholders)
    if drafts:
        so.scheduled_spec_decode_tokens[request_id] = drafts
    _count(so, request_id, 1 + len(drafts))


def _count(so: SchedulerOutput, row_id: str, num_tokens: int) -> None:
    so.num_scheduled_tokens[row_id] = num_tokens
    so.total_num_scheduled_tokens += num_tokens
