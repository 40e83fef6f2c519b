"""One engine per page format: the format is chosen when an engine starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import LiveGroup
from tests.engine.harness import Harness

FORMATS = ["turboquant4", "turboquant3", "turboquant2", "kivi4", "kivi2", "rotatekv4", "kvquant4"]
RECENT = 8  # fewer uncompressed tokens than by default, so that short outputs are folded


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
