"""Environment of every test run: few threads, no pinning, in-process engines, no hub, no time limit per example."""

import os

from hypothesis import settings

from vericache.demo.worker import ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "2")
settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")
