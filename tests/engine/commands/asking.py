"""Requests to the live server, with VeriCache's options, and answers made comparable."""

from typing import Any

from openai import OpenAI

# A nearly perfect drafter: whole blocks are accepted, and whatever ends a request ends it inside one.
PERFECT = {"vericache_compressor": "streaming_llm", "vericache_counts": "uniform", "vericache_ratio": 1.0}
OFF = {"vericache_mode": "off"}
CERTIFIED = {"vericache_mode": "certified"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "b"]}}, "required": ["n", "s"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
STANDARD = {
    "max_tokens", "logprobs", "echo", "temperature", "seed", "top_p", "n", "presence_penalty", "frequency_penalty",
    "stop", "top_logprobs", "response_format", "tools", "tool_choice", "stream", "stream_options", "logit_bias",
}  # fmt: skip


def ask(create: Any, asked: dict[str, Any], options: dict[str, Any], **where: Any) -> Any:
    body = {"max_tokens": 40, "temperature": 0, **asked}
    standard = {k: v for k, v in body.items() if k in STANDARD}
    extra = {k: v for k, v in body.items() if k not in STANDARD} | {"vllm_xargs": options}
    return create(model="demo", **standard, extra_body=extra, **where)


def completion(client: OpenAI, prompt: list[int], asked: dict[str, Any], options: dict[str, Any]) -> Any:
    asked = asked if asked.get("stream") else {"return_token_ids": True, **asked}
    return ask(client.completions.create, asked, options, prompt=prompt)


def chat(client: OpenAI, text: str, asked: dict[str, Any], options: dict[str, Any]) -> Any:
    return ask(client.chat.completions.create, asked, options, messages=[{"role": "user", "content": text}])


def comparable(answer: Any) -> Any:
    """Without what differs between two calls: ids, times, and the acceptance itself."""
    whole = answer.model_dump(exclude={"id", "created", "kv_transfer_params", "metrics"})
    whole["usage"].pop("completion_tokens_details")
    whole["usage"].pop("prompt_tokens_details", None)
    for choice in whole["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            call.pop("id")
    return round_floats(whole)


def round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {k: round_floats(v) for k, v in value.items()}
    return [round_floats(v) for v in value] if isinstance(value, list) else value
