"""Host memory registered with CUDA."""

import gc

import pytest
import torch

from vericache.store.pinned import pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_given_up_with_the_last_tensor() -> None:
    """The system gives the same addresses again, which CUDA must not take for registered ones."""
    size, seen = 64 << 20, set()
    for _ in range(4):
        half = pinned(size)[size // 2 :]
        assert half.is_pinned()
        assert (half == 0).all()
        half.fill_(1)
        assert half.cuda(non_blocking=True).sum().item() == size // 2
        seen.add(half.data_ptr())
        del half
        gc.collect()
    assert len(seen) < 4
