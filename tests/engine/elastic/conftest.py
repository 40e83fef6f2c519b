"""A model of two layers with random weights: many moves in little time."""

import random
from pathlib import Path

import pytest

from tests import tiny_model

PROMPT_TOKENS = 240


@pytest.fixture(scope="session")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder(_tiny: Path) -> Path:
    return _tiny


@pytest.fixture(scope="session")
def texts() -> dict[str, list[int]]:
    rng = random.Random(0)
    return {f"p{i}": [rng.randrange(3, tiny_model.VOCABULARY) for _ in range(PROMPT_TOKENS)] for i in range(8)}
