"""The arena's memory: equal head pages, and the stack of free ones."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vericache.draft.formats import PageFormat
from vericache.errors import ArenaFullError


@dataclass
class PagePool:
    """The same memory twice: ``bytes`` uint8 ``[P, page_bytes]``, and ``data``, what uncompressed tokens of the tails
    are written to: ``[P, 2, tail_page_tokens, D]`` in the model's dtype."""

    bytes: Tensor
    data: Tensor
    free: list[int] = field(init=False)

    @classmethod
    def of(cls, num_pages: int, page_format: PageFormat, device: torch.device | str) -> "PagePool":
        f = page_format
        content = torch.zeros(num_pages, f.page_bytes, dtype=torch.uint8, device=device)
        numbers = content.view(f.dtype)[:, : 2 * f.tail_page_tokens * f.head_dim]
        return cls(content, numbers.unflatten(1, (2, f.tail_page_tokens, f.head_dim)))

    def __post_init__(self) -> None:
        self.free = list(range(len(self.bytes) - 1, -1, -1))

    def take(self, count: int) -> Tensor:
        """int32 ``[count]``, all or nothing."""
        if count > len(self.free):
            raise ArenaFullError(
                f"the draft arena has {len(self.free)} of {len(self.bytes)} head pages free, {count} are needed; "
                f"raise arena_fraction, lower ratio, or serve fewer requests at once"
            )
        split = len(self.free) - count
        ids = torch.tensor(self.free[split:], dtype=torch.int32)
        del self.free[split:]
        return ids

    def release(self, ids: Tensor) -> None:
        self.free.extend(ids.flatten().tolist())
