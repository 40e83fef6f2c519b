"""One engine per page format: the format is chosen when an engine starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import LiveGroup
from tests.engine.harness import ENGINE, Harness
from tests.reference import Reference
from vericache.demo.worker import Job, run_in_process

FORMATS = ["turboquant4", "turboquant3", "turboquant2", "kivi4", "kivi2", "rotatekv4", "kvquant4"]
RECENT = 8  # fewer uncompressed tokens than by default, so that short outputs are folded
NAMES = ["continue_code", "continue_prose", "summarise", "write_tests"]
PAGE = 32
OUTPUT = 120  # enough for three folds
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


@pytest.fixture(scope="session")
def reference(small_folder: Path) -> Reference:
    return Reference(small_folder)


@pytest.fixture(scope="session")
def plain(small_folder: Path, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Stock vLLM's greedy output."""
    chosen = {n: texts[n] for n in NAMES}
    return run_in_process(Job(str(small_folder), chosen, OUTPUT, ENGINE, ignore_eos=True)).tokens


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of it for one format, identity and rounds of one method for each; the rest is slow."""
    for item in items:
        found = item.callspec.params if hasattr(item, "callspec") else {}
        if found.get("page_format", FORMATS[0]) != FORMATS[0] and found.get("compressor") != "streaming_llm":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=FORMATS)
def page_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pages(page_format: str) -> dict[str, Any]:
    """Settings of the arena's pages."""
    return {"page_format": page_format}


@pytest.fixture
def engine(folder: Path, pages: dict[str, Any], _live: LiveGroup) -> Iterator[Harness]:
    """Their engine with default settings; after the test nothing may be held or left anywhere."""
    harness = _live.engine("packed", folder, **pages, recent=RECENT)
    harness.configure()
    yield harness
    harness.assert_at_rest()
