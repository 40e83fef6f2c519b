"""A stream cut into single tokens is the stream vLLM gives when it decodes one token a step (public fault 13)."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import RequestOutput
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from server.deltas import TokenByToken
from vericache.demo import model

PROMPT = [1, 2, 3]
ARGUMENTS = {"n": 7, "s": "a longer text, so that its tokens spread over several deltas"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
_JSON = json.dumps({"name": "look_up", "arguments": ARGUMENTS})
_PYTHON = f"[look_up(n=7, s={ARGUMENTS['s']!r})]"
_XML = (
    "<tool_call>\n<function=look_up>\n<parameter=n>\n7\n</parameter>\n"
    f"<parameter=s>\n{ARGUMENTS['s']}\n</parameter>\n</function>\n</tool_call>"
)
CALLS = {
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "xlam": f"[{_JSON}]",
    "granite-20b-fc": f"<function_call> {_JSON}",
    "granite": f"<|tool_call|>[{_JSON}]",
    "pythonic": _PYTHON,
    "llama4_pythonic": _PYTHON,
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
}
ALL = 1000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(str(model.prepare()))


def stream(
    tokenizer: Any, ids: Sequence[int], sizes: Iterable[int], params: SamplingParams, eos: bool = False
) -> list[RequestOutput]:
    """vLLM's own outputs when a step delivers so many tokens (the last size repeats). Ends by ``eos`` or by length."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None, external_req_id="r")
    processor.add_request(request, None)
    outputs, rest, steps = [], list(ids), list(sizes)
    while rest:
        block, rest = rest[: steps[0]], rest[steps[0] :]
        steps = steps[1:] or steps
        reason = None if rest else (FinishReason.STOP if eos else FinishReason.LENGTH)
        done = processor.process_outputs([EngineCoreOutput("r", block, finish_reason=reason)])
        outputs += [o for o in done.request_outputs if isinstance(o, RequestOutput)]
        if outputs and outputs[-1].finished:
            break
    return outputs


def delta_params(**options: Any) -> SamplingParams:
    return SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=4000, **options)


def facts(outputs: Iterable[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (o.finished, s.index, s.text, list(s.token_ids), s.finish_reason, s.stop_reason)
        for o in outputs
        for s in o.outputs
    ]


def cut(tokenizer: Any, outputs: Iterable[RequestOutput], params: SamplingParams) -> list[RequestOutput]:
    splitter = TokenByToken(tokenizer, params)
    return [single for output in outputs for single in splitter.split(output)]


TEXTS = ["Zoë said: 🐈‍⬛ naïve 東京 ✓ ", "```json\n{}\n```", " the stop of it", "<|im_start|>", "\n\n", "x" * 9]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    options=st.fixed_dictionaries(
        {
            "stop": st.sampled_from([None, ["stop of"], ["京", "}"]]),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "min_tokens": st.sampled_from([0, 12]),
        }
    ),
    eos=st.booleans(),
)
def test_cut_outputs_are_those_of_single_token_steps(
    tokenizer: Any, texts: list[str], sizes: list[int], options: dict[str, Any], eos: bool
) -> None:
    ids = tokenizer.encode("".join(texts), add_special_tokens=False) + [tokenizer.eos_token_id] * eos
    params = delta_params(**options)
    blocks = stream(tokenizer, ids, sizes, params, eos)
    assert facts(cut(tokenizer, blocks, params)) == facts(stream(tokenizer, ids, [1], params, eos))


def test_sequences_and_what_comes_once(tokenizer: Any) -> None:
    """n > 1 merged into one output, log probabilities by token, prompt log probabilities and transfer params once."""
    params = delta_params()
    ids = tokenizer.encode("one two three four")
    (merged,) = stream(tokenizer, ids, [ALL], params)
    (other,) = stream(tokenizer, ids[:2], [ALL], params)
    other.outputs[0].index = 1
    merged.outputs.append(other.outputs[0])
    merged.outputs[0].logprobs = [{i: None} for i in ids]  # type: ignore[dict-item]
    merged.prompt_logprobs, merged.kv_transfer_params = [None], {"vericache": {"mode": "draft"}}
    parts = TokenByToken(tokenizer, params).split(merged)
    assert [p.outputs[0].index for p in parts] == [0] * len(ids) + [1, 1]
    assert [p.outputs[0].logprobs for p in parts[: len(ids)]] == [[{i: None}] for i in ids]
    assert [p.prompt_logprobs for p in parts] == [[None]] + [None] * (len(parts) - 1)
    assert [p.kv_transfer_params for p in parts] == [None] * (len(parts) - 1) + [merged.kv_transfer_params]
    assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]


def test_text_that_is_not_its_tokens_is_passed_on_whole(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = delta_params()
    (output,) = stream(tokenizer, tokenizer.encode("one two"), [ALL], params)
    output.outputs[0].text = "something else"
    with caplog.at_level("ERROR", "vllm.vericache.deltas"):
        assert facts(TokenByToken(tokenizer, params).split(output)) == facts([output])


def parsed(tokenizer: Any, name: str, outputs: Iterable[RequestOutput]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of every call, as a client would add them up."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "tool_choice": "auto"}
    request = ChatCompletionRequest.model_validate(asked)
    kind = ParserManager.get_parser(name, enable_auto_tools=True, tokenizer=tokenizer)
    assert kind is not None
    parser = kind(tokenizer, request.tools)
    content, calls = "", dict[int, list[str]]()
    for output in outputs:
        (sequence,) = output.outputs
        message = parser.parse_delta(
            sequence.text, list(sequence.token_ids), request, output.prompt_token_ids, finished=output.finished
        )
        content += (message.content or "") if message else ""
        for call in message.tool_calls if message else ():
            known = calls.setdefault(call.index, ["", ""])
            if call.function:
                known[0] += call.function.name or ""
                known[1] += call.function.arguments or ""
    return content, [(n, a) for n, a in calls.values()]


def call_ids(tokenizer: Any, name: str) -> list[int]:
    return [*tokenizer.encode(CALLS[name], add_special_tokens=False), tokenizer.eos_token_id]


@pytest.mark.parametrize("name", CALLS)
def test_every_parser_gets_the_whole_call(tokenizer: Any, name: str) -> None:
    params = delta_params(skip_special_tokens=False)
    ids = call_ids(tokenizer, name)
    for size in (1, 2, 3, 5, 9, 17, 30, ALL):
        blocks = stream(tokenizer, ids, [size], params, eos=True)
        _, calls = parsed(tokenizer, name, cut(tokenizer, blocks, params))
        assert [(n, json.loads(a)) for n, a in calls] == [("look_up", ARGUMENTS)], size


def test_long_deltas_still_break_a_parser_of_vllm(tokenizer: Any) -> None:
    """When this fails, vLLM's parsers cope with long deltas, and ``server.deltas`` may go."""
    params = delta_params(skip_special_tokens=False)
    ids = call_ids(tokenizer, "xlam")
    sizes = (2, 5, 9, 17, ALL)
    outcomes = [parsed(tokenizer, "xlam", stream(tokenizer, ids, [n], params, eos=True))[1] for n in sizes]
    assert any(calls != [("look_up", json.dumps(ARGUMENTS))] for calls in outcomes)


def test_prose_passes_every_parser_that_takes_the_tokenizer(tokenizer: Any) -> None:
    """Whatever the accepted blocks were, the client reads the same."""
    params = delta_params()
    ids = tokenizer.encode("A plain answer: naïve 東京 🐈 {not a call}, [1, 2], done.", add_special_tokens=False)
    tried = 0
    names = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers} - {"openai"}  # Harmony has its own
    for name in sorted(names):
        try:
            ParserManager.get_parser(name, enable_auto_tools=True, tokenizer=tokenizer)
        except (TypeError, ImportError):  # needs a tokenizer or a package of its own
            continue
        single = parsed(tokenizer, name, stream(tokenizer, ids, [1], params))
        for size in (4, ALL):
            blocks = stream(tokenizer, ids, [size], params)
            assert parsed(tokenizer, name, cut(tokenizer, blocks, params)) == single, (name, size)
        tried += 1
    assert tried > 30
