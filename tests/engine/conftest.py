"""Shared by all engine tests: the bundled model, one VeriCache engine, stock vLLM's answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.engine.harness import ENGINE, SETTINGS, Harness
from vericache.demo import model, prompts
from vericache.demo.worker import Job, run_in_process

PROMPT_TOKENS = 240
OUTPUT_TOKENS = 64


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def folder() -> Path:
    return model.prepare()


@pytest.fixture(scope="session")
def texts(folder: Path) -> dict[str, list[int]]:
    """The eight bundled prompts, cut short."""
    return prompts.load(list(prompts.PROMPTS), AutoTokenizer.from_pretrained(folder), PROMPT_TOKENS)


@pytest.fixture(scope="session")
def stock(folder: Path, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Greedy output of stock vLLM, from a process in which VeriCache's backend does not exist."""
    job = Job(str(folder), texts, OUTPUT_TOKENS, ENGINE, ignore_eos=True)
    return run_in_process(job).tokens


@pytest.fixture(scope="session")
def _engine(stock: dict[str, list[int]], folder: Path) -> Harness:
    # After ``stock``, so that the two do not fight for memory and cores.
    return Harness(folder, ENGINE, SETTINGS)


@pytest.fixture
def engine(_engine: Harness) -> Iterator[Harness]:
    """The engine with default settings; afterwards nothing may be held or left anywhere."""
    _engine.configure()
    yield _engine
    _engine.assert_at_rest()
