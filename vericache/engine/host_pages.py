"""Host pages. One that holds a full block of a prompt is kept once for all requests whose prompts begin alike.

A page is filed under its block's key (vLLM's block hash, which covers all tokens before it) when the copy to it is
issued, and whoever needs the same block becomes another holder. It is not written again while anyone relies on it:
write-back touches only blocks behind the prompt, which are nobody else's.

Whoever holds or files a filed page holds the filed pages of all blocks before it, and a filed page has a holder. So the
keys that are found are the first ones of a prompt, along a request's pages there are fewer and fewer holders, and when
a copy failed its holders are all who could rely on it.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence

from vericache.engine.ledger import IdPool


class HostPages(IdPool):
    """The ids ``0 .. size - 1``, each with one or more holders."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._more: dict[int, int] = {}  # page -> holders beside the first
        self._holders = 0  # sum of these
        self._filed: dict[Hashable, int] = {}  # key -> page
        self._keys: dict[int, Hashable] = {}
        self._mixed: set[int] = set()  # pages whose bytes need not be those that each holder's own prefill computed

    @property
    def share(self) -> float:
        """Pages in use, over what they would be without sharing."""
        used = self.size - self.free
        return used / (used + self._holders) if used else 1.0

    def file(self, page: int, key: Hashable) -> None:
        """From now on ``page`` is what is to be found under ``key``."""
        self._filed[key] = page
        self._keys[page] = key

    def withdraw(self, pages: Iterable[int]) -> None:
        """Nobody finds these pages any more; who holds them keeps them."""
        for page in pages:
            if (key := self._keys.pop(page, None)) is not None and self._filed[key] == page:
                del self._filed[key]

    def withdraw_all(self) -> None:
        self._filed.clear()
        self._keys.clear()

    def find(self, key: Hashable) -> int | None:
        return self._filed.get(key)

    def known(self, keys: Sequence[Hashable], count: int) -> int:
        """How many of the first ``count`` blocks have a page."""
        return bisect_left(keys, True, hi=min(count, len(keys)), key=lambda key: key not in self._filed)

    def hold(self, page: int) -> int:
        """Become another holder of ``page``, which is returned."""
        self._more[page] = self._more.get(page, 0) + 1
        self._holders += 1
        self.mix([page])
        return page

    def mix(self, pages: Iterable[int]) -> None:
        """These, a request's leading pages, may hold what another prefill computed than their holder relies on."""
        self._mixed.update(pages)

    def mixed(self, pages: Sequence[int]) -> int:
        """How many of a request's pages, the leading ones, may hold what another prefill computed: they have, or had,
        several holders."""
        return bisect_left(pages, True, key=lambda page: page not in self._mixed)

    def let_go(self, pages: Iterable[int]) -> list[int]:
        """One holder less for each of ``pages``. Returns those that nobody holds any more: nobody finds them from now
        on, and they are to be released once no step in flight writes to them."""
        last = []
        for page in pages:
            if more := self._more.pop(page, 0):
                self._holders -= 1
                if more > 1:
                    self._more[page] = more - 1
            else:
                last.append(page)
        self.withdraw(last)
        self._mixed.difference_update(last)
        return last

    def held_by_others(self, pages: Sequence[int]) -> int:
        """How many of a request's pages, the leading ones, have another holder."""
        return bisect_left(pages, True, key=lambda page: page not in self._more)

    def worth_sharing(self, pages: Sequence[int]) -> int:
        """Leading pages to be reloaded together: where most is saved, be it a long prefix with few or a short one with
        many. Holders of the same prefix find the same."""
        best, saved, end = 0, 0.0, 0
        while end < len(pages) and (more := self._more.get(pages[end], 0)):
            end = bisect_left(pages, True, lo=end, key=lambda page: self._more.get(page, 0) < more)
            if end * more / (more + 1) > saved:
                best, saved = end, end * more / (more + 1)
        return best
