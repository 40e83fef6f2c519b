"""Device KV blocks that VeriCache holds itself, out of vLLM's own pool.

Blocks are always given back by explicit list. Relies on ``BlockPool.get_new_blocks`` / ``touch`` / ``free_blocks`` /
``get_num_free_blocks`` / ``hash_block_size``, ``KVCacheManager.get_block_ids`` / ``pop_blocks_for_free`` /
``enable_caching``, ``Request.block_hashes``, and ``SingleTypeKVCacheManager.req_to_blocks`` / ``num_cached_block`` /
``block_size``.
"""

from collections.abc import Hashable, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request


class DeviceBlocks:
    """Transient and scratch blocks. They carry no hash: the prefix cache never sees them."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool

    @property
    def free(self) -> int:
        return self._pool.get_num_free_blocks()

    @property
    def used(self) -> int:
        return self._pool.num_gpu_blocks - 1 - self.free  # block 0 is vLLM's null block

    def take(self, count: int) -> list[KVCacheBlock] | None:
        """``count`` blocks, or None when fewer are free."""
        return self._pool.get_new_blocks(count) if count <= self.free else None

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One more reference to each, which ``give`` takes back."""
        self._pool.touch(blocks)

    def give(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Return blocks, those with no other reference to the pool; the last ones are reused first, so that a cached
        prefix lives longest."""
        self._pool.free_blocks(list(reversed(blocks)))

    def of_request(self, request: Request) -> list[int]:
        """Ids of the blocks vLLM holds for a request (one KV cache group)."""
        return list(self._manager.get_block_ids(request.request_id)[0])

    def keys(self, request: Request) -> Sequence[Hashable]:
        """Of a request's full blocks, as far as their tokens are known: equal keys, equal KV. None where vLLM's prefix
        cache would not take one request's KV for another's."""
        (manager,) = self._manager.coordinator.single_type_managers
        cached = self._manager.enable_caching and not request.skip_reading_prefix_cache
        return request.block_hashes if cached and manager.block_size == self._pool.hash_block_size else ()

    def attach(self, request: Request, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks that hold a request's KV into vLLM's books: the reverse of ``detach``. The prefix cache learns of
        them when the request's next row is scheduled, which is after everything in flight."""
        (manager,) = self._manager.coordinator.single_type_managers
        assert not manager.req_to_blocks.get(request.request_id), "vLLM holds blocks of a detached request"
        manager.req_to_blocks[request.request_id] = list(blocks)
        manager.num_cached_block[request.request_id] = 0

    def detach(self, request: Request) -> list[KVCacheBlock]:
        """Take a request's blocks out of vLLM's books; the caller gives them back."""
        return self._manager.pop_blocks_for_free(request)


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [b.block_id for b in blocks]
