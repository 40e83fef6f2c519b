"""The tokens behind a compressed context: how many pages they take, and when they are folded.

Pure numbers. Where the arena's format is packed, verified tokens leave the uncompressed tail for packed pages, a full
page of every head at a time; the last ``keep`` of them stay. Only verified tokens are folded, so a rollback never meets
one. Where pages are simulated, the same tokens are rounded and stay in the tail.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache.draft.formats import PageFormat


@dataclass(frozen=True)
class TailSizes:
    """``page_tokens`` tokens in a compressed page, ``tail_page_tokens`` in one of the tail; rounds draft at most
    ``window`` tokens."""

    page_tokens: int
    tail_page_tokens: int
    packed: bool
    keep: int
    window: int
    simulated: bool = False

    @classmethod
    def of(cls, pages: "PageFormat", keep: int, window: int) -> "TailSizes":
        return cls(pages.page_tokens, pages.tail_page_tokens, pages.packed, keep, window, pages.simulated)

    def strips(self, tokens: int) -> int:
        """Pages per head that ``tokens`` tokens behind the context take at most."""
        folded = self.due(tokens) if self.packed else 0
        uncompressed = min(tokens, self._most) if self.packed else tokens
        return folded - (-uncompressed // self.tail_page_tokens)

    def due(self, verified: int) -> int:
        """Strips to fold when ``verified`` verified tokens are not folded."""
        return max(0, verified - self.keep) // self.page_tokens if self.packed or self.simulated else 0

    def room(self, uncompressed: int, tokens: int, capacity: int) -> int:
        """Tokens that may still follow when ``tokens`` are behind the context, ``uncompressed`` of them in the tail,
        and ``capacity`` tokens were reserved."""
        most = self._most - uncompressed if self.packed else capacity
        return min(capacity - tokens, most)

    @property
    def _most(self) -> int:
        """Uncompressed tokens at a time: what is not folded yet, a round under verification, and the next one."""
        return self.keep + self.page_tokens - 1 + 2 * (self.window + 1)
