"""Fixtures that several tensor tests use, and helpers whose failed asserts show the compared values."""

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("tests.tensor.compressor_runs", "tests.tensor.worker_world")

from tests.tensor.worker_world import World  # noqa: E402 registered above, before its first import


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """vLLM compiles the rank count of logprobs, which takes longer than all tests of sampling."""
    with torch.compiler.set_stance("force_eager"):
        yield
