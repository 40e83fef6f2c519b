"""The generated retrieval tasks: reproducible, of the length asked for, and answerable from their context."""

import pytest

from benchmarks.certified_tasks import KINDS, make


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_reproducible_and_its_answers_are_in_the_context(kind: str) -> None:
    task = make(kind, 6000, seed=3)
    assert task == make(kind, 6000, seed=3)
    assert task != make(kind, 6000, seed=4)
    assert 2000 < len(task.context) < 12000
    assert task.questions
    for question, answer in task.questions:
        assert question.startswith("\n\nQuestion: ")
        assert all(part.strip() in task.context for part in answer.split(","))
