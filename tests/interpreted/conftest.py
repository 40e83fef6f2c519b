"""Triton has no CPU backend: these tests run on a GPU, or through the interpreter in processes that
``tests/tensor/test_interpreted.py`` starts (it must be chosen before Triton is imported)."""

import os

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py", "engine/*"]
