"""Stops, lengths and block edges inside an accepted draft."""

import pytest
from vllm import SamplingParams

from benchmarks.engine import tokens
from tests.engine.harness import Harness


@pytest.fixture
def long_blocks(engine: Harness) -> Harness:
    """A nearly perfect drafter: limits fall into the middle of accepted blocks."""
    engine.configure(compressor="streaming_llm", counts="uniform", ratio=1.0, draft_length=12)
    return engine


def test_max_tokens_anywhere_in_a_block(
    long_blocks: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    lengths = [1, 2, 3, 4, 12, 13, 14, 15]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = long_blocks.generate([texts["continue_code"]] * len(lengths), params)
    assert tokens(outputs) == [stock["continue_code"][:n] for n in lengths]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_stop_token_anywhere_in_a_block(
    long_blocks: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    answer = stock["summarise"]
    places = [i for i in (0, 1, 5, 11, 12, 13, 14, 25) if answer.index(answer[i]) == i]
    params = [SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[answer[i]]) for i in places]
    outputs = long_blocks.generate([texts["summarise"]] * len(places), params)
    assert tokens(outputs) == [answer[: i + 1] for i in places]
    assert [o.outputs[0].stop_reason for o in outputs] == [answer[i] for i in places]


def test_stop_string_across_tokens(long_blocks: Harness, texts: dict[str, list[int]]) -> None:
    """Text, ids and logprobs end at the same token (public fault 1)."""
    prompt = texts["continue_prose"]
    (free,) = long_blocks.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    text = free.outputs[0].text
    stops = [text[i : i + 6] for i in range(10, 60, 7)]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[s], logprobs=1) for s in stops]
    drafted = long_blocks.generate([prompt] * len(stops), params)
    before = long_blocks.coordinator.settings
    long_blocks.coordinator.configure(before.model_copy(update={"min_prompt_tokens": 100_000}))
    plain = long_blocks.generate([prompt] * len(stops), params)
    for a, b in zip(drafted, plain, strict=True):
        assert a.outputs[0].text == b.outputs[0].text
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason == "stop"
        assert len(a.outputs[0].logprobs) == len(a.outputs[0].token_ids)


def test_natural_end_in_a_block(long_blocks: Harness, texts: dict[str, list[int]]) -> None:
    """An end token ends drafting: the request verifies early instead of drafting past it."""
    params = [SamplingParams(temperature=0, max_tokens=80), SamplingParams(temperature=0, max_tokens=80, min_tokens=60)]
    prompt = texts["summarise"]
    assert tokens(long_blocks.generate([prompt] * 2, params)) == long_blocks.plain([prompt] * 2, params)


@pytest.mark.parametrize("short_of", [3, 4, 8, 13, 14, 30])
def test_context_limit_in_a_block(long_blocks: Harness, texts: dict[str, list[int]], short_of: int) -> None:
    """Public fault 14: a prompt that nearly fills the context, max_tokens far beyond it."""
    limit = long_blocks.scheduler.max_model_len
    prompt = (texts["continue_code"] * 10)[: limit - short_of]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    (output,) = long_blocks.generate([prompt], params)
    assert [list(output.outputs[0].token_ids)] == long_blocks.plain([prompt], params)
    assert output.outputs[0].finish_reason == "length"
    assert len(prompt) + len(output.outputs[0].token_ids) == limit
    small = SamplingParams(temperature=0, max_tokens=4)
    assert len(tokens(long_blocks.generate([texts["summarise"]], small))[0]) == 4


@pytest.mark.parametrize("length", [pytest.param(190, marks=pytest.mark.slow), 191, 192, 193])
def test_verify_around_a_block_edge(engine: Harness, texts: dict[str, list[int]], length: int) -> None:
    """Public faults 18 and 19: verifies that end on, before and after a block edge; rejections across it."""
    prompts = [texts["continue_code"][:length], texts["summarise"][:length]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = engine.plain(prompts, params)
    poor = {"compressor": "random", "counts": "per_head"}
    good = {"compressor": "streaming_llm", "counts": "uniform", "ratio": 0.9}
    for drafter, draft_length in ((poor, 1), (poor, 5), (good, 31), (good, 32), (good, 33)):
        engine.configure(**drafter, draft_length=draft_length)
        assert tokens(engine.generate(prompts, params)) == expected


def test_repetitive_prompt(engine: Harness) -> None:
    """Public fault 4: greedy output on a prompt of one repeated word."""
    prompt = engine.tokenizer.encode(" serving" * 200)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    expected = engine.plain([prompt], params)
    for compressor, counts in (("kvzip", "per_head"), ("random", "per_head")):
        engine.configure(compressor=compressor, counts=counts)
        assert tokens(engine.generate([prompt], params)) == expected


@pytest.mark.parametrize("compressor", ["kvzip", "snapkv", "streaming_llm", "random"])
def test_context_shorter_than_every_window(engine: Harness, compressor: str) -> None:
    """Public fault 27: five tokens, less than SnapKV's window and one sink; drafts may be bad, the output is not."""
    prompt = engine.tokenizer.encode("The history of the city of")[:5]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = engine.plain([prompt], params)
    counts = "uniform" if compressor == "streaming_llm" else "per_head"
    options = {"window": 2} if compressor == "snapkv" else {}
    engine.configure(
        compressor=compressor,
        counts=counts,
        min_prompt_tokens=4,
        ratio=0.75,
        sinks=1,
        recent=2,
        draft_length=5,
        compressor_options=options,
    )
    (output,) = engine.generate([prompt], params)
    assert tokens([output]) == expected
    assert output.kv_transfer_params["vericache"]["mode"] == "draft"


def test_long_generation_is_compressed_anew(engine: Harness, texts: dict[str, list[int]]) -> None:
    """A tail longer than tail_tokens is compressed again at a verify boundary, from the full KV that is there."""
    prompt = texts["continue_code"][:160]
    params = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
    expected = engine.plain([prompt], params)
    for compressor, counts in (("kvzip", "per_head"), ("streaming_llm", "uniform")):
        engine.configure(compressor=compressor, counts=counts, tail_tokens=30, window=16, draft_length=8)
        with engine.recorded_kept() as kept:
            (output,) = engine.generate([prompt], params)
        assert tokens([output]) == expected
        contexts = [int(k.positions.max()) + 1 for k in kept[output.request_id]]
        assert len(contexts) > 2
        assert contexts == sorted(contexts)
