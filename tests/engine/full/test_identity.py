"""float32: the output is plain vLLM's, token for token, whatever drafts."""

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

# Covers every ratio with every policy, both concurrencies, and count modes of some methods; every method is in
# small/test_methods.py, and all of it is a run of benchmarks.lossless --full.
CASES = [
    ("streaming_llm", "uniform", 0.25, "lockstep", 1),
    ("snapkv", "per_layer", 0.5, "lockstep", 4),
    ("kvzip", "per_head", 0.25, "staggered", 4),
    ("kvzip", "uniform", 0.5, "staggered", 1),
    ("random", "per_head", 0.25, "lockstep", 4),
]
MORE = [
    ("streaming_llm", "uniform", 0.5, "staggered", 4),
    ("snapkv", "uniform", 0.25, "staggered", 4),
    ("snapkv", "per_head", 0.25, "staggered", 1),
    ("kvzip", "per_layer", 0.25, "staggered", 4),
    ("kvzip", "per_head", 0.5, "lockstep", 1),
    ("random", "uniform", 0.25, "staggered", 1),
    ("random", "per_layer", 0.25, "lockstep", 4),
]


@pytest.mark.parametrize(
    ("compressor", "counts", "ratio", "policy", "at_once"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_greedy_equals_stock_vllm(
    engine: Harness,
    texts: dict[str, list[int]],
    stock: dict[str, list[int]],
    compressor: str,
    counts: str,
    ratio: float,
    policy: str,
    at_once: int,
) -> None:
    engine.configure(compressor=compressor, counts=counts, ratio=ratio, policy=policy)
    names = list(texts)[: 4 if at_once == 4 else 2]
    for start in range(0, len(names), at_once):
        batch = names[start : start + at_once]
        outputs = engine.generate([texts[n] for n in batch], GREEDY)
        assert tokens(outputs) == [stock[n] for n in batch]
        assert [s["mode"] for s in summaries(outputs)] == ["draft"] * len(batch)


def test_small_ratio(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """c = 0.1 of a short prompt: fewer sinks and recent tokens, drafts that are mostly rejected."""
    engine.configure(
        compressor="snapkv",
        counts="uniform",
        ratio=0.1,
        sinks=2,
        recent=10,
        draft_length=6,
        compressor_options={"window": 8},
    )
    names = list(texts)[4:8]
    assert tokens(engine.generate([texts[n] for n in names], GREEDY)) == [stock[n] for n in names]


def test_long_accepted_blocks(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """ratio 1.0: a nearly perfect drafter, so that whole blocks of 25 are accepted."""
    engine.configure(compressor="streaming_llm", counts="uniform", ratio=1.0, draft_length=25)
    outputs = engine.generate(list(texts.values()), GREEDY)
    assert tokens(outputs) == list(stock.values())
    for summary in summaries(outputs):
        assert summary["accepted_per_round"][0] == summary["drafted_per_round"][0] >= 20


def test_mixed_with_resident_requests(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Draft, verify, prefill and plain rows in one batch; a prompt below the threshold stays resident."""
    names = list(texts)[:4]
    short = [texts[n][:60] for n in names]
    expected = engine.plain(short, GREEDY)
    engine.configure()
    outputs = engine.generate([texts[names[0]], short[0], texts[names[1]], short[1], short[2], short[3]], GREEDY)
    assert tokens(outputs) == [stock[names[0]], expected[0], stock[names[1]], expected[1], expected[2], expected[3]]
    reports = summaries(outputs)
    assert [r["mode"] for r in reports] == ["draft", "resident", "draft", "resident", "resident", "resident"]
    assert "min_prompt_tokens" in reports[1]["reason"]


@pytest.mark.parametrize(
    ("policy", "compressor"),
    [
        ("staggered", "kvzip"),
        ("lockstep", "random"),
        pytest.param("staggered", "random", marks=pytest.mark.slow),
        pytest.param("lockstep", "kvzip", marks=pytest.mark.slow),
    ],
)
def test_sampled_equals_full_kv_sampling(
    engine: Harness, texts: dict[str, list[int]], policy: str, compressor: str
) -> None:
    """T = 0.7 with a seed: exactly what the same sampler gives when every request is resident."""
    prompts = list(texts.values())[:4]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=48, ignore_eos=True) for i in range(4)]
    engine.configure(policy=policy, compressor=compressor)
    assert tokens(engine.generate(prompts, params)) == engine.plain(prompts, params)


def test_two_steps_in_flight(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """Run-ahead scheduling, as on a GPU: identical, with the same rounds as without."""
    names = list(texts)[:4]
    engine.configure()
    plain = engine.generate([texts[n] for n in names], GREEDY)
    with engine.run_ahead():
        ahead = engine.generate([texts[n] for n in names], GREEDY)
    assert tokens(ahead) == tokens(plain) == [stock[n] for n in names]
    assert [s["accepted_per_round"] for s in summaries(ahead)] == [s["accepted_per_round"] for s in summaries(plain)]


def test_user_parameters_on_verify_rows(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Penalties, bias, min-p, top-k/p, bad words, allowed ids, min tokens and logprobs, mixed in one batch."""
    prompts = list(texts.values())[:8]
    common = engine.plain(prompts[:1], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    params = [
        SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=32, frequency_penalty=0.7, logprobs=3),
        SamplingParams(temperature=0, max_tokens=32, logit_bias=dict.fromkeys(common[:3], -100.0)),
        SamplingParams(temperature=0.8, seed=1, max_tokens=32, top_k=20, top_p=0.9, logprobs=0),
        SamplingParams(temperature=0.9, seed=2, max_tokens=32, min_p=0.05),
        SamplingParams(temperature=0, max_tokens=32, bad_words=[" the", " and of"]),
        SamplingParams(temperature=0, max_tokens=32, allowed_token_ids=sorted(set(common) | set(range(200, 400)))),
        SamplingParams(temperature=0, max_tokens=40, min_tokens=12, stop_token_ids=common[10:14], logprobs=20),
    ]
    engine.configure(compressor="streaming_llm", counts="uniform", ratio=0.8)
    with_drafts = engine.generate(prompts, params)
    before = engine.coordinator.settings
    engine.coordinator.configure(before.model_copy(update={"min_prompt_tokens": 100_000}))
    without = engine.generate(prompts, params)
    assert tokens(with_drafts) == tokens(without)
    assert [o.outputs[0].finish_reason for o in with_drafts] == [o.outputs[0].finish_reason for o in without]
    for a, b in zip(with_drafts, without, strict=True):
        assert (a.outputs[0].logprobs is None) == (b.outputs[0].logprobs is None)
        for x, y in zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True):
            assert x.keys() == y.keys()
            assert all(abs(x[t].logprob - y[t].logprob) < 1e-4 and x[t].rank == y[t].rank for t in x)


def test_unseeded_requests_differ(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Without a seed every request gets its own, children of n > 1 and users of one parameter object included; the
    object stays as it was."""
    engine.configure()
    params = SamplingParams(temperature=1.0, n=3, max_tokens=16, ignore_eos=True)
    outputs = engine.generate([texts["continue_code"]] * 2, params)
    children = [tuple(c.token_ids) for o in outputs for c in o.outputs]
    assert len(set(children)) == 6
    assert params.seed is None
