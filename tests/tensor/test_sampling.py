"""The seeds of shared noise, and how a verify row's samples are folded into the tokens it accepts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler

from tests.tensor.sampling_batch import VOCAB
from vericache.engine.sampling import PLACEHOLDER, accept, accepted, row_seeds

quick = settings(max_examples=100, deadline=None, derandomize=True)


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
