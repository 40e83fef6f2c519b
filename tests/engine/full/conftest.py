"""One engine for this package."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import at_rest_afterwards, running_engine, stock_output
from tests.engine.harness import Harness


@pytest.fixture(scope="package")
def folder(full_folder: Path) -> Path:
    return full_folder


@pytest.fixture(scope="package")
def stock(folder: Path, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    return stock_output(folder, texts)


@pytest.fixture(scope="package")
def _engine(folder: Path, stock: dict[str, list[int]]) -> Iterator[Harness]:
    yield from running_engine(folder, max_model_len=3072)  # the bundled prompts at full length


@pytest.fixture
def engine(_engine: Harness) -> Iterator[Harness]:
    yield from at_rest_afterwards(_engine)
