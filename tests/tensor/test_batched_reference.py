"""The benchmarks' batched reference against the plain one, on the CPU."""

from pathlib import Path

import pytest
import torch

from benchmarks.batched_reference import BatchedReference
from compressors import Kept
from tests.reference import Past, Reference, Rounds, Row, greedy, run
from tests.tiny_model import save

DRAFTS = (3, 8, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"), 32)


def accepted(reference: Reference) -> list[list[int]]:
    """Rounds over ragged contexts of different lengths."""
    rng = torch.Generator().manual_seed(1)
    config = reference.model.config
    heads = (config.num_hidden_layers, config.num_key_value_heads)
    walks = []
    for n in (40, 57):
        prompt = torch.randint(0, 100, (n,), generator=rng).tolist()
        full, own, output = reference.full(prompt), Past(), list[int]()
        for step in range(40):
            row = Row([(prompt + output)[-1]], n - 1 + step, [full.part(0, n - 1)], own)
            output.append(int(reference.forward([row])[0][-1].argmax()))
            own = Past(row.keys, row.values)
        counts = torch.randint(20, n, heads, generator=rng)
        kept = [torch.randperm(n, generator=rng)[:c].sort().values for c in counts.flatten().tolist()]
        known = reference.full(output[:-1], full)
        rounds = Rounds([*prompt, *output], n, known, Kept(counts, torch.cat(kept)), greedy)
        walks += [(rounds, rounds.whole(x)) for x in DRAFTS]
    return run(reference, walks)


def test_as_the_rows_one_by_one(folder: Path) -> None:
    expected = accepted(Reference(folder))
    assert any(any(rounds) for rounds in expected)
    assert accepted(BatchedReference(folder)) == expected
