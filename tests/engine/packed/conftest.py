"""One engine per page format: the format is chosen when an engine starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import LiveGroup
from tests.engine.harness import Harness

FORMATS = ["turboquant4", "turboquant3", "turboquant2", "kivi4", "kivi2", "rotatekv4", "kvquant4"]
RECENT = 8  # fewer uncompressed tokens than by default, so that short outputs are folded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of it for one format, identity and rounds of one method for each; the rest is slow."""
    for item in items:
        found = item.callspec.params if hasattr(item, "callspec") else {}
        if found.get("page_format", FORMATS[0]) != FORMATS[0] and found.get("compressor") != "streaming_llm":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=FORMATS)
def page_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(folder: Path, page_format: str, _live: LiveGroup) -> Iterator[Harness]:
    """Its engine with default settings; after the test nothing may be held or left anywhere."""
    harness = _live.engine("packed", folder, page_format=page_format, recent=RECENT)
    harness.configure()
    yield harness
    harness.assert_at_rest()
