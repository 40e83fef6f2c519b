"""A verify row gives the tokens that one row per token gives, whatever the request's sampling parameters are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from tests.tensor.sampling_batch import VOCAB, metadata_of, params_of
from vericache.engine.sampling import PLACEHOLDER, KeyedTopKTopP, RequestRow, accepted, row_seeds, sample

pytestmark = pytest.mark.usefixtures("eager")


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
