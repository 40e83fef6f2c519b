"""Shared-noise sampling: a verify row gives the tokens that one row per token gives, and the right distribution."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from vericache.engine.sampling import PLACEHOLDER, KeyedTopKTopP, RequestRow, accept, accepted, row_seeds, sample

VOCAB = 32
quick = settings(max_examples=100, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    """vLLM compiles the rank count of logprobs, which takes longer than all tests here."""
    with torch.compiler.set_stance("force_eager"):
        yield


# -- vLLM's own side: metadata and single rows, built without the code under test ----------------------------------


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


@dataclass
class Single:
    """One ordinary row's sample."""

    token: int
    logprobs: LogprobsTensors | None


def single(
    params: SamplingParams,
    prompt: Sequence[int],
    history: Sequence[int],
    logits: Tensor,
    position: int,
    mode: str = "raw_logprobs",
    num_logprobs: int | None = None,
) -> Single:
    """vLLM's sampler over a batch of one request with this history; only the noise is keyed."""
    sampler = Sampler(mode)
    sampler.topk_topp_sampler = KeyedTopKTopP(mode)
    sampler.topk_topp_sampler.seeds = row_seeds([params.seed or 0], [position])
    metadata = metadata_of([RequestRow(params, prompt, history)])
    if num_logprobs is not None:
        metadata = replace(metadata, max_num_logprobs=num_logprobs)
    output = sampler(logits=logits[None].clone(), sampling_metadata=metadata)
    return Single(int(output.sampled_token_ids), output.logprobs_tensors)


# -- row seeds -------------------------------------------------------------------------------------------------------


def splitmix(seed: int, position: int) -> int:
    """SplitMix64's finaliser over (seed, position) in Python's integers."""
    mask, x = 2**64 - 1, seed & (2**64 - 1)
    for word in (0, position):
        x = ((x ^ word) + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return x >> 33


@quick
@given(pairs=st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31)), max_size=6))
def test_row_seeds_are_the_documented_hash(pairs: list[tuple[int, int]]) -> None:
    got = row_seeds([s for s, _ in pairs], [p for _, p in pairs])
    assert got.dtype == torch.int64
    assert got.tolist() == [splitmix(s, p) for s, p in pairs]
    assert all(0 <= x < 2**31 for x in got.tolist())


def test_row_seeds_do_not_depend_on_the_batch() -> None:
    alone = [int(row_seeds([s], [p])) for s, p in ((7, 100), (8, 100), (7, 101))]
    assert row_seeds([7, 8, 7], [100, 100, 101]).tolist() == alone
    assert row_seeds([7, 7, 8], [101, 100, 100]).tolist() == [alone[2], alone[0], alone[1]]


def test_row_seeds_differ_by_seed_and_by_position() -> None:
    """Close seeds and positions, which requests have in practice (n > 1 uses seed + index)."""
    seeds, positions = np.meshgrid(np.arange(100), np.arange(200))
    values = row_seeds(seeds.flatten().tolist(), positions.flatten().tolist()).numpy()
    # 20,000 draws from 2**31 values collide about 0.09 times.
    assert len(np.unique(values)) >= len(values) - 2
    # And they fill the range evenly, along either axis.
    assert stats.kstest(values / 2**31, "uniform").pvalue > 1e-3
    grid = values.reshape(200, 100) / 2**31
    assert abs(np.corrcoef(grid[1:].ravel(), grid[:-1].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, 1:].ravel(), grid[:, :-1].ravel())[0, 1]) < 0.03


# -- accepting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(6))
def test_accepted_counts_the_leading_equals(length: int) -> None:
    draft = [10 + i for i in range(length)]
    for wrong in range(length + 1):
        samples = [*draft, 99]
        if wrong < length:
            samples[wrong] = 50
            for later in (samples, samples[: wrong + 1] + [98] * (length - wrong)):
                assert accepted(draft, later) == wrong
        else:
            assert accepted(draft, samples) == length


def test_a_match_behind_a_mismatch_does_not_count() -> None:
    assert accepted([1, 2, 3], [9, 2, 3, 4]) == 0
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == 1


@quick
@given(data=st.data())
def test_accept_folds_rows_and_their_logprobs(data: st.DataObject) -> None:
    """Against a loop over rows. Logprob rows are tagged with their logits row's number."""
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    token = st.integers(0, 2)
    drafts = [data.draw(st.lists(token, min_size=c, max_size=c)) for c in counts]
    total = sum(counts) + len(counts)
    samples = data.draw(st.lists(token, min_size=total, max_size=total))
    tag = torch.arange(total)
    logprobs = LogprobsTensors(tag[:, None].int().repeat(1, 3), tag[:, None] + torch.tensor([0.1, 0.2, 0.3]), tag * 10)
    out = accept(SamplerOutput(torch.tensor(samples, dtype=torch.int32)[:, None], logprobs), drafts)
    width = 1 + max(counts)
    assert out.sampled_token_ids.shape == (len(drafts), width)
    assert out.sampled_token_ids.dtype == torch.int32
    kept_rows, start = [], 0
    for i, draft in enumerate(drafts):
        mine = samples[start : start + len(draft) + 1]
        kept = accepted(draft, mine) + 1
        assert out.sampled_token_ids[i].tolist() == mine[:kept] + [PLACEHOLDER] * (width - kept)
        kept_rows.append(list(range(start, start + kept)))
        start += len(draft) + 1
    assert out.logprobs_tensors is not None
    for field, source in zip(out.logprobs_tensors[:3], logprobs[:3], strict=True):
        assert field.shape == (len(drafts) * width, *source.shape[1:])
        for i, rows in enumerate(kept_rows):
            assert torch.equal(field[i * width : i * width + len(rows)], source[rows])
    # And as the runner reads it: placeholders dropped, logprob rows filtered alike.
    tokens, filtered = RejectionSampler.parse_output(
        out.sampled_token_ids, VOCAB, logprobs_tensors=out.logprobs_tensors
    )
    flat = [row for rows in kept_rows for row in rows]
    assert tokens == [[samples[row] for row in rows] for rows in kept_rows]
    assert filtered.logprob_token_ids[:, 0].tolist() == flat


def test_accept_without_logprobs() -> None:
    out = accept(SamplerOutput(torch.tensor([[4], [5], [6]], dtype=torch.int32), None), [[4], []])
    assert out.sampled_token_ids.tolist() == [[4, 5], [6, PLACEHOLDER]]
    assert out.logprobs_tensors is None


# -- verify rows against single rows -----------------------------------------------------------------------------------

# After every token one other token is forbidden, so that the border between output and drafts matters.
PAIRS = [[a, (a * 7 + 3) % VOCAB] for a in range(VOCAB)]
TRIPLES = [[a, b, (a + b) % VOCAB] for a in range(VOCAB) for b in range(VOCAB)]
STOPS = list(range(0, VOCAB, 2))

PLAIN: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "random": {"temperature": 0.9}}
FEATURES: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "top_k": {"temperature": 1.2, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.6},
    "top_k and top_p": {"temperature": 1.2, "top_k": 9, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.4},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.9},
    "all penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.9},
    "logit_bias": {"logit_bias": {3: 4.0, 7: -100.0, 12: 2.5}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": STOPS},
    "bad words": {"bad_words": [[5], *PAIRS]},
    "long bad words": {"bad_words": TRIPLES},
    "allowed ids": {"allowed_token_ids": [1, 4, 9, 16, 25]},
    "logprobs": {"logprobs": 3},
    "no top logprobs": {"logprobs": 0},
    "logprob ids": {"logprob_token_ids": [5, 17, 20]},
    "everything": {
        "temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "logit_bias": {2: 3.0}, "min_tokens": 4, "stop_token_ids": STOPS,
        "bad_words": PAIRS, "logprobs": 2,
    },
}  # fmt: skip
SHOWN_ONLY = {"logprobs", "no top logprobs", "logprob ids"}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Every feature at its own temperature, and else both greedy and random."""
    out = list(PLAIN.items())
    for name, values in FEATURES.items():
        bases = {"": {}} if "temperature" in values else {f" {base}": extra for base, extra in PLAIN.items()}
        out += [(name + base, {**extra, **values}) for base, extra in bases.items()]
    return out


def random_logits(rows: int, seed: int) -> Tensor:
    """Flat enough that noise and masks decide, with the stop tokens a little ahead so that forbidding them tells."""
    logits = 1.5 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, STOPS] += 0.5
    return logits


@dataclass
class Verify:
    """A verify row with what vLLM's single rows give for it."""

    row: RequestRow
    logits: Tensor
    positions: list[int]
    singles: list[Single]

    @property
    def tokens(self) -> list[int]:
        return [s.token for s in self.singles[: accepted(self.row.drafts, [s.token for s in self.singles]) + 1]]


def make_verify(
    params: SamplingParams,
    count: int,
    right: int,
    seed: int,
    mode: str = "raw_logprobs",
    num_logprobs: int | None = None,
) -> Verify:
    """A row of ``count`` drafts whose first ``right`` are what the verifier samples, the next is not."""
    rng = np.random.default_rng(seed)
    prompt, output = (rng.integers(0, VOCAB, size).tolist() for size in (6 + seed % 3, 2))
    logits, first = random_logits(count + 1, seed), 50 + seed
    singles: list[Single] = []
    drafts: list[int] = []
    for j in range(count + 1):
        singles.append(single(params, prompt, [*output, *drafts], logits[j], first + j, mode, num_logprobs))
        token = singles[-1].token if j < right else (singles[-1].token + 1) % VOCAB
        drafts.append(token if j <= right else int(rng.integers(VOCAB)))
    row = RequestRow(params, prompt, output, drafts[:count])
    return Verify(row, logits, list(range(first, first + count + 1)), singles)


def check_batch(verifies: Sequence[Verify], mode: str = "raw_logprobs", logprobs: bool = False) -> None:
    """``sample`` over all rows at once, against each row's singles."""
    rows, sampler = [v.row for v in verifies], Sampler(mode)
    logits = torch.cat([v.logits for v in verifies])
    positions = [p for v in verifies for p in v.positions]
    out = sample(sampler, logits.clone(), metadata_of(rows), rows, positions, VOCAB)
    width = out.sampled_token_ids.shape[1]
    assert width == 1 + max(len(row.drafts) for row in rows)
    for i, verify in enumerate(verifies):
        tokens = verify.tokens
        assert out.sampled_token_ids[i].tolist() == tokens + [PLACEHOLDER] * (width - len(tokens))
        if not logprobs:
            continue
        assert out.logprobs_tensors is not None
        for j in range(len(tokens)):
            wanted = verify.singles[j].logprobs
            assert wanted is not None
            for got, expected in zip(out.logprobs_tensors[:3], wanted[:3], strict=True):
                assert torch.equal(got[i * width + j], expected[0])


@pytest.mark.parametrize(("name", "values"), cases(), ids=[name for name, _ in cases()])
def test_a_verify_row_gives_what_single_rows_give(name: str, values: dict[str, Any]) -> None:
    """All lengths and all places of the first wrong draft. The feature must also have changed something."""
    params, differs = params_of(**values), False
    plain = params_of(temperature=values.get("temperature", 1.0))
    shows = any(key in values for key in ("logprobs", "logprob_token_ids"))
    for count in range(5):
        for right in range(count + 1):
            verify = make_verify(params, count, right, seed=100 * count + right)
            assert len(verify.tokens) == right + 1
            check_batch([verify], logprobs=shows)
            for j, found in enumerate(verify.singles):
                history = [*verify.row.output, *verify.row.drafts[:j]]
                other = single(plain, verify.row.prompt, history, verify.logits[j], verify.positions[j])
                differs |= other.token != found.token
    unfeatured = name in (*PLAIN, "cold") or name.rsplit(" ", 1)[0] in SHOWN_ONLY
    assert differs != unfeatured


def test_min_tokens_is_reached_inside_a_block() -> None:
    """The first drafts are shorter than the minimum, later ones are not: stop ids come free at the border."""
    params = params_of(temperature=0.0, min_tokens=4, stop_token_ids=STOPS, logit_bias=dict.fromkeys(STOPS, 50.0))
    verify = make_verify(params, 4, 4, seed=3)  # the output holds 2 tokens
    assert [token in STOPS for token in verify.tokens] == [False, False, True, True, True]
    check_batch([verify])


@pytest.mark.parametrize("trial", range(4))
def test_a_mixed_batch(trial: int) -> None:
    """Every case at once, of all lengths, in some order: no row's parameters reach another row."""
    rng = np.random.default_rng(trial)
    chosen = [values for _, values in cases() if "logprob_token_ids" not in values]
    verifies = []
    for i, values in enumerate(chosen):
        count = int(rng.integers(0, 6))
        verifies.append(
            make_verify(
                params_of(seed=int(rng.integers(2**40)), **values), count, int(rng.integers(0, count + 1)),
                seed=1000 * trial + i, num_logprobs=3,
            )
        )  # fmt: skip
    rng.shuffle(verifies)
    check_batch(verifies, logprobs=True)


def test_short_prompts_are_padded_with_no_token() -> None:
    """A repetition penalty on a padding id would change a short prompt's row because a long one is in the batch."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 0], logits[:, 9] = 1.0, 0.9
    penalised = params_of(temperature=0.0, repetition_penalty=1.5)
    rows = [RequestRow(penalised, [5], [4]), RequestRow(penalised, list(range(20)), [4])]
    out = sample(Sampler(), logits, metadata_of(rows), rows, [2, 21], VOCAB)
    assert out.sampled_token_ids.tolist() == [[0], [0]]  # the long prompt holds both 0 and 9
    rows[1] = replace(rows[1], prompt=[0] * 20)
    out = sample(Sampler(), logits, metadata_of(rows), rows, [2, 21], VOCAB)
    assert out.sampled_token_ids.tolist() == [[0], [9]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_modes(mode: str, temperature: float) -> None:
    params = params_of(temperature=temperature, top_p=0.8 if temperature else 1.0, logprobs=4, presence_penalty=0.5)
    check_batch(
        [make_verify(params, 3, 2, seed=8, mode=mode), make_verify(params, 0, 0, seed=9, mode=mode)], mode, True
    )


@pytest.mark.parametrize("count", [0, 3])
def test_batches_without_drafts_keep_vllms_shape(count: int) -> None:
    verifies = [make_verify(params_of(temperature=t, logprobs=2), 0, 0, seed=20 + i) for i, t in enumerate((0.0, 1.0))]
    if count:
        verifies.append(make_verify(params_of(temperature=1.0, logprobs=2), count, 1, seed=25))
    check_batch(verifies, logprobs=True)


def test_a_draft_row_samples_its_parents_token() -> None:
    """Same seed, position, history and logits: the draft is what the verifier samples there, so it is accepted."""
    for name, values in cases():
        params = params_of(**values)
        verify = make_verify(params, 3, 3, seed=31)
        for j in range(4):
            history = [*verify.row.output, *verify.row.drafts[:j]]
            row = RequestRow(params, verify.row.prompt, history, is_draft=True)
            # Its own request asks for no logprobs; everything else is copied from the parent.
            metadata = replace(metadata_of([row]), max_num_logprobs=None, logprob_token_ids=None)
            logits = verify.logits[j : j + 1].clone()
            out = sample(Sampler(), logits, metadata, [row], [verify.positions[j]], VOCAB)
            assert out.sampled_token_ids.tolist() == [[verify.singles[j].token]], name


def test_draft_rows_add_no_logprob_tokens() -> None:
    """They are nobody's output, and the parent's ids must not widen the batch's logprobs."""
    params = params_of(temperature=0.0, logprob_token_ids=[5, 17])
    rows = [
        RequestRow(params, [1, 2], [3], is_draft=True),
        RequestRow(params_of(temperature=0.0, logprob_token_ids=[9]), [1], [], [4]),
    ]
    metadata = metadata_of(rows)
    out = sample(Sampler(), random_logits(3, 0), metadata, rows, [3, 8, 9], VOCAB)
    assert out.logprobs_tensors is not None
    assert out.logprobs_tensors.logprob_token_ids.shape == (4, 2)
    alone = sample(Sampler(), random_logits(3, 0)[:1], metadata_of(rows[:1]), rows[:1], [3], VOCAB)
    assert alone.logprobs_tensors is None


def test_greedy_rows_equal_stock_vllm() -> None:
    """Installing the sampler changes no greedy output: vLLM's own ``Sampler``, untouched, as the reference."""
    for seed, values in enumerate(v for _, v in cases() if not v["temperature"]):
        rows = [RequestRow(params_of(**values), [3, 1, 4], [1, 5 + i], ()) for i in range(3)]
        logits = random_logits(3, seed)
        stock = Sampler()(logits=logits.clone(), sampling_metadata=metadata_of(rows))
        ours = sample(Sampler(), logits.clone(), metadata_of(rows), rows, [7, 8, 9], VOCAB)
        assert torch.equal(stock.sampled_token_ids, ours.sampled_token_ids)


def test_one_sampler_serves_step_after_step() -> None:
    """The noise belongs to (seed, position), not to how often or in which company the sampler was called."""
    sampler, params = Sampler(), params_of(temperature=1.0)
    row = RequestRow(params, [1], [2])
    logits = random_logits(1, 0).expand(40, -1)
    together = sample(sampler, logits.clone(), metadata_of([row] * 40), [row] * 40, range(40), VOCAB)
    installed = sampler.topk_topp_sampler
    assert isinstance(installed, KeyedTopKTopP)
    for position in reversed(range(40)):
        alone = sample(sampler, logits[:1].clone(), metadata_of([row]), [row], [position], VOCAB)
        assert alone.sampled_token_ids.item() == together.sampled_token_ids[position].item()
    assert sampler.topk_topp_sampler is installed


# -- distributions -----------------------------------------------------------------------------------------------------

DRAWS = 20_000
SMALL = torch.tensor([1.4, -0.3, 0.9, 0.0, 2.0, -1.2, 0.6, 1.1])
SIGNIFICANCE = 1e-3  # seeds are fixed, so a test passes always or never


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Softmax after temperature, top-k, then the smallest set of likeliest tokens that holds ``top_p``."""
    scaled = logits.double().numpy() / temperature
    order = np.argsort(-scaled)
    if top_k:
        scaled[order[top_k:]] = -math.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[before >= top_p]] = 0
    return p / p.sum()


def keyed_draws(params: Sequence[SamplingParams], positions: Sequence[int], logits: Tensor = SMALL) -> np.ndarray:
    """One draw per (params, position), all on the same logits."""
    rows, vocab = [RequestRow(p, (), ()) for p in params], len(logits)
    out = sample(Sampler(), logits.expand(len(rows), -1).clone(), metadata_of(rows, vocab), rows, positions, vocab)
    return out.sampled_token_ids.flatten().numpy()


def fits(draws: np.ndarray, expected: np.ndarray) -> bool:
    counts = np.bincount(draws, minlength=len(expected))
    support = expected > 0
    assert counts[~support].sum() == 0
    return support.sum() == 1 or stats.chisquare(counts[support], expected[support] * len(draws)).pvalue > SIGNIFICANCE


SETTINGS = [
    {"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 2.0}, {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("values", SETTINGS, ids=str)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_keyed_noise_has_the_right_distribution(values: dict[str, Any], vary: str) -> None:
    """Over the positions of one request (one long output) and over the seeds of many requests at one position."""
    expected = probabilities(SMALL, **values)
    assert 1 < (expected > 0).sum() <= len(SMALL)
    if vary == "position":
        draws = keyed_draws([params_of(seed=1234, **values)] * DRAWS, range(DRAWS))
    else:
        draws = keyed_draws([params_of(seed=seed, **values) for seed in range(DRAWS)], [777] * DRAWS)
    assert fits(draws, expected)


def test_the_chi_square_test_can_fail() -> None:
    """Draws at another temperature are told apart, so agreement above means something."""
    draws = keyed_draws([params_of(seed=1234, temperature=1.0)] * DRAWS, range(DRAWS))
    assert not fits(draws, probabilities(SMALL, 1.07))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_distribution_is_stock_vllms(temperature: float) -> None:
    """Two samples, the other one from vLLM's unpatched sampler with its own noise."""
    draws = keyed_draws([params_of(seed=99, temperature=temperature, top_p=0.9)] * DRAWS, range(DRAWS))
    torch.manual_seed(0)
    logits = (SMALL / temperature).expand(DRAWS, -1).clone()
    stock, _ = TopKTopPSampler()(logits, {}, None, torch.full((DRAWS,), 0.9))
    table = np.stack([np.bincount(x, minlength=len(SMALL)) for x in (draws, stock.flatten().numpy())])
    support = table.sum(0) > 0
    assert ((table > 0) == support).all()
    assert stats.chi2_contingency(table[:, support]).pvalue > SIGNIFICANCE
    assert fits(stock.flatten().numpy(), probabilities(SMALL, temperature, top_p=0.9))


@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(across: str) -> None:
    """Consecutive positions of a request, and the children of one request (seed, seed + 1) at a position."""
    if across == "positions":
        draws = keyed_draws([params_of(seed=5, temperature=1.0)] * DRAWS, range(DRAWS))
        first, second = draws[0::2], draws[1::2]
    else:
        first, second = (
            keyed_draws([params_of(seed=seed, temperature=1.0)] * DRAWS, range(DRAWS)) for seed in (41, 42)
        )
    table = np.zeros((len(SMALL), len(SMALL)))
    np.add.at(table, (first, second), 1)
    assert stats.chi2_contingency(table).pvalue > SIGNIFICANCE


def test_a_verify_block_has_the_verifiers_distribution() -> None:
    """Whatever the drafts are, the emitted token is the verifier's own sample: 20,000 rows with a fixed draft."""
    rows = [RequestRow(params_of(seed=seed, temperature=0.5), (), (), [4]) for seed in range(20_000)]
    metadata = metadata_of(rows, len(SMALL))
    logits = SMALL.expand(2 * len(rows), -1).clone()
    positions = [p for _ in rows for p in (30, 31)]
    tokens = sample(Sampler(), logits, metadata, rows, positions, len(SMALL)).sampled_token_ids.numpy()
    expected = probabilities(SMALL, 0.5)
    assert fits(tokens[:, 0], expected)
    followed = tokens[:, 1] != PLACEHOLDER
    assert (followed == (tokens[:, 0] == 4)).all()
    assert fits(tokens[followed, 1], expected)


def test_seeded_and_unseeded_rows_in_one_batch() -> None:
    """The seeded request is reproduced exactly in any company; the unseeded one still follows its distribution."""
    values = {"temperature": 1.0, "top_p": 0.9}
    seeded, unseeded = params_of(seed=77, **values), params_of(seed=None, **values)
    assert unseeded.seed is None
    count = DRAWS
    alone = keyed_draws([seeded] * count, range(count))
    for mixed in ([seeded, unseeded] * count, [unseeded, seeded] * count):
        draws = keyed_draws(mixed, [p for p in range(count) for _ in range(2)])
        at = mixed.index(seeded)
        assert (draws[at::2] == alone).all()
        assert fits(draws[1 - at :: 2], probabilities(SMALL, **values))
        # Independent of its neighbour, too: a shared stream would repeat the neighbour's tokens.
        table = np.zeros((len(SMALL), len(SMALL)))
        np.add.at(table, (draws[0::2], draws[1::2]), 1)
        used = table[table.sum(1) > 0][:, table.sum(0) > 0]
        assert stats.chi2_contingency(used).pvalue > SIGNIFICANCE
