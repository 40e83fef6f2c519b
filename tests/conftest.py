"""Environment of every test run: few threads, no pinning, in-process engines, no hub, no time limit per example. And
the order: what cannot be shared out comes first, so that both processes of a run end at the same time."""

import os

import pytest
from hypothesis import settings

from vericache.demo.worker import ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "2")
settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.name != "test_interpreted.py", "engine" not in item.path.parts))
