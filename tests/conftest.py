"""Environment of every test run: few threads, no pinning, in-process engines, no hub."""

import os

from vericache.demo.worker import ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "2")
