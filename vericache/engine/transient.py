"""Device blocks of rounds. What several requests reload from the same host pages is on the device once.

A block that holds a shared page has one reference (``KVCacheBlock.ref_cnt``) per request, so it goes back to vLLM's
pool with the last of them. While it is there, any round that needs its page takes it as it is.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vericache.engine.blocks import DeviceBlocks


class Transient:
    """Which host pages have a copy on the device. Who holds a copy holds the page, so a page that has one is not
    given to anybody else."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks
        self._copies: dict[int, KVCacheBlock] = {}  # by host page
        self._pages: dict[int, int] = {}  # by block id

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, pages: Sequence[int], count: int) -> tuple[list[KVCacheBlock], int] | None:
        """``count`` blocks, the first ones for the host ``pages`` that others may use, too; and how many of these are
        on the device already. None, and nothing taken, when too few blocks are free."""
        here: list[KVCacheBlock] = []
        while len(here) < len(pages) and (block := self._copies.get(pages[len(here)])) is not None:
            here.append(block)
        fresh = self._blocks.take(count - len(here))
        if fresh is None:
            return None
        self._blocks.touch(here)
        for page, block in zip(pages[len(here) :], fresh, strict=False):
            if page not in self._copies:
                self._copies[page], self._pages[block.block_id] = block, page
        return here + fresh, len(here)

    def give(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let go of blocks: the last holder's go back to the pool."""
        self._blocks.give(blocks)
        self.forget(block.block_id for block in blocks if not block.ref_cnt)

    def keep(self, blocks: Sequence[KVCacheBlock]) -> bool:
        """Make blocks their holder's alone, for good; False when another request uses one of them."""
        if any(block.ref_cnt > 1 for block in blocks):
            return False
        self.forget(block.block_id for block in blocks)
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks are no copies, or no longer."""
        for block_id in block_ids:
            if (page := self._pages.pop(block_id, None)) is not None:
                del self._copies[page]

    def forget_pages(self, pages: Iterable[int]) -> None:
        """What is on the device is no longer what these pages are to hold."""
        self.forget([self._copies[page].block_id for page in pages if page in self._copies])
