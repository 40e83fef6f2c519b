"""The prediction of rounds by teacher forcing is what drafting token by token gives, for all draft lengths at once."""

import pytest
import torch

from compressors import Kept
from tests import tiny_model
from tests.reference import Past, Reference, Rounds, Row, greedy, run, visible_positions

CONTEXT, OUTPUT = 40, 36
LENGTHS = [1, 5, 8, 20]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tiny_model.save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return torch.randint(3, tiny_model.VOCABULARY, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def output(reference: Reference, prompt: list[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < OUTPUT:
        ids += greedy(reference.forward([Row([*prompt, *ids], 0, [])])[0][-1:], [0])
    return ids


def kept(share: float, seed: int) -> Kept:
    """Other positions, and another number of them, in every head of 2 layers and 2 KV heads."""
    chosen = torch.rand(4, CONTEXT, generator=torch.Generator().manual_seed(seed)) < share
    chosen[:, 0] = True
    return Kept(chosen.sum(1).view(2, 2), chosen.nonzero()[:, 1])


def drafted(reference: Reference, past: Past, first: int, count: int) -> list[int]:
    """What a drafter says that sees ``past`` and its own drafts."""
    own, ids = Past(), [first]
    for _ in range(count):
        row = Row(ids[-1:], past.length + own.length, [past], own)
        ids += greedy(reference.forward([row])[0], [0])
        own = Past(row.keys, row.values)
    return ids[1:]


def rounds_by_drafting(reference: Reference, tokens: list[int], selection: Kept, length: int) -> list[int]:
    full, n, accepted = reference.full(tokens[:-1]), CONTEXT, []
    while n + length < len(tokens):
        tail = torch.ones(2, 2, n - CONTEXT, dtype=torch.bool)
        visible = torch.cat([visible_positions(selection, CONTEXT), tail], -1)
        past = Past([k[:, :n] for k in full.keys], [v[:, :n] for v in full.values], visible)
        drafts = drafted(reference, past, tokens[n], length)
        known = tokens[n + 1 : n + 1 + length]
        accepted.append(next((i for i in range(length) if drafts[i] != known[i]), length))
        n += accepted[-1] + 1
    return accepted


@pytest.mark.parametrize("share", [0.2, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_rounds_of_all_lengths_are_those_of_a_drafter(
    reference: Reference, prompt: list[int], output: list[int], share: float
) -> None:
    tokens = [*prompt, *output]
    selections = [kept(share, seed) for seed in (1, 2)]
    full = reference.full(tokens[:-1])
    walks = []
    for selection in selections:
        rounds = Rounds(tokens, CONTEXT, full, selection, greedy)
        walks += [(rounds, rounds.whole(x)) for x in LENGTHS]
    expected = [rounds_by_drafting(reference, tokens, s, x) for s in selections for x in LENGTHS]
    found = run(reference, walks)
    assert found == expected
    if share == 1.0:
        assert all(a == x for of_walk, x in zip(found, LENGTHS * 2, strict=True) for a in of_walk)
    else:
        assert any(a < x for of_walk, x in zip(found, LENGTHS * 2, strict=True) for a in of_walk)


def test_no_start_is_computed_twice(
    reference: Reference, prompt: list[int], output: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work does not grow with the number of draft lengths where rounds end before the shortest of them."""
    tokens = [*prompt, *output]
    rounds = Rounds(tokens, CONTEXT, reference.full(tokens[:-1]), kept(0.2, 1), greedy)
    seen: list[tuple[int, int]] = []
    forward = reference.forward

    def recording(rows: list[Row]) -> list[torch.Tensor]:
        seen.extend((row.start - row.own.length, row.start) for row in rows)
        return forward(rows)

    monkeypatch.setattr(reference, "forward", recording)
    run(reference, [(rounds, rounds.whole(x)) for x in (8, 12, 16, 20)])
    assert len(seen) == len(set(seen))


def test_a_round_that_the_output_cuts_off_counts_what_it_shows(
    reference: Reference, prompt: list[int], output: list[int]
) -> None:
    everything = kept(2.0, 1)
    found = reference.predict(prompt, output, everything, [0, 10, 20, 25], greedy)
    assert found == [0, 10, 20, OUTPUT - 1 - 1 - 11 - 21]
