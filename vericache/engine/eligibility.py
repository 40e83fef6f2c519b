"""Which requests may leave the device, and why the others stay plain vLLM rows."""

from typing import NamedTuple

from vllm.v1.request import Request


class Reason(NamedTuple):
    """Why a request is a plain row: a code from a small set (metrics) and a sentence (the response)."""

    code: str
    text: str


ROOM = Reason("room", "the KV pool had room for it")
NO_PAY = Reason("no_pay", "drafting would not have paid: the link, or its share of right drafts, was too low")
NO_ARENA = Reason("no_arena", "there is no memory to draft in: drafting would not pay here, or arena_fraction is 0")
POOLS_FULL = Reason("pools_full", "the draft arena, the host store or the KV pool was full")


def resident_reason(request: Request, min_prompt_tokens: int) -> Reason | None:
    """None when the request may draft, else the reason it stays resident."""
    params = request.sampling_params
    if params is None:
        return Reason("unsupported", "pooling requests have no tokens to draft")
    if request.num_prompt_tokens < min_prompt_tokens:
        tokens = f"prompt of {request.num_prompt_tokens} tokens"
        return Reason("short_prompt", f"{tokens} is shorter than min_prompt_tokens {min_prompt_tokens}")
    if request.max_tokens < 3:
        return Reason("short_output", f"max_tokens {request.max_tokens} leaves nothing to draft")
    for present, what in (
        (request.has_encoder_inputs, "multimodal inputs"),
        (request.prompt_embeds is not None, "prompt embeddings"),
        (request.lora_request is not None, "LoRA adapters"),
        (request.resumable, "streaming input sessions"),
        (params.thinking_token_budget is not None, "thinking_token_budget"),
    ):
        if present:
            return Reason("unsupported", f"drafting with {what} is not supported yet")
    return None


def end_tokens(request: Request) -> frozenset[int]:
    """Tokens after which nothing is worth drafting (as ``vllm.v1.core.sched.utils.check_stop`` ends at them)."""
    params = request.sampling_params
    eos = () if params.eos_token_id is None else (params.eos_token_id,)
    return frozenset((*eos, *(params.stop_token_ids or ())))
