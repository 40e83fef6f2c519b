"""The host page store: one preallocated array of KV page images, all layers of a page side by side.

The scheduler owns the page ids; this is only the memory. A page image is the raw device block of every layer, so
the store does not depend on how an attention backend lays a block out.
"""

import torch
from torch import Tensor

from vericache.errors import ConfigError
from vericache.store.pinned import pinned


class HostStore:
    """``data [pages, layers, *block_shape]``. A page holds one block of every layer."""

    def __init__(self, num_pages: int, caches: list[Tensor]) -> None:
        """``caches`` are the device KV caches, one ``[blocks, *block_shape]`` per layer, all alike. Pinned for a GPU.

        Raises:
            ConfigError: the layers differ, or the host has not enough memory.
        """
        shapes = {(tuple(c.shape[1:]), c.dtype) for c in caches}
        if len(shapes) != 1:
            raise ConfigError(f"the KV caches of the layers differ in shape or dtype: {shapes}; expected one kind")
        ((block_shape, dtype),) = shapes
        shape = (num_pages, len(caches), *block_shape)
        if caches[0].device.type == "cuda":
            self.data = pinned(num_pages * page_bytes(caches)).view(dtype).view(shape)
        else:  # untouched pages cost address space only: torch.empty maps memory lazily on the CPU
            self.data = torch.empty(shape, dtype=dtype)


def page_bytes(caches: list[Tensor]) -> int:
    """Bytes of one page image."""
    return sum(c[0].nbytes for c in caches)
