"""Scores that outlive their scoring pass, so that a context which begins alike is not scored anew: another request's
with the same document, or the request's own when it is compressed again. Pure; the workers hold the numbers
(``CompressionWorker``) and are told what to keep and what to drop.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

Key = Hashable  # of method, options and all tokens up to the part's end


@dataclass(frozen=True)
class ScorePart:
    """Scores ``[L, H, end - start]`` of the context tokens ``start .. end - 1``, as the workers know them."""

    part_id: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass
class _Held:
    part: ScorePart
    passes: int = 0  # that rely on it


class ScoreParts:
    """Parts of at most ``capacity`` context tokens, of which the one unused for longest goes first. A part that a pass
    relies on stays until ``release``."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.tokens = capacity, 0
        self._held: dict[Key, _Held] = {}  # the longest unused first
        self._keys: dict[int, Key] = {}
        self._dropped: list[int] = []  # the workers do not know yet
        self._withdrawn: dict[int, _Held] = {}  # nobody finds them, but a pass relies on them
        self._claimed = set[Key]()
        self._next = 0

    @property
    def relied_on(self) -> bool:
        """By a pass under way, which may also have claimed some."""
        return bool(self._claimed or self._withdrawn or any(held.passes for held in self._held.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def take(self, key: Key) -> ScorePart | None:
        """Rely on a part, if it is there."""
        held = self._held.pop(key, None)
        if held is None:
            return None
        self._held[key] = held  # the latest used
        held.passes += 1
        return held.part

    def release(self, parts: Iterable[ScorePart]) -> None:
        """What ``take`` gave is needed no more."""
        for part in parts:
            key = self._keys.get(part.part_id)
            held = self._withdrawn[part.part_id] if key is None else self._held[key]
            held.passes -= 1
            if key is None and not held.passes:
                del self._withdrawn[part.part_id]
                self._dropped.append(part.part_id)
        self._trim(self.capacity)

    def claim(self, key: Key, start: int, end: int) -> ScorePart:
        """A part that a pass is about to score, for the workers to keep: others wait for it. ``add`` or ``drop``
        follows."""
        assert not self.claimed(key), "a part is scored by one pass at a time"
        self._claimed.add(key)
        self._next += 1
        return ScorePart(self._next, start, end)

    def claimed(self, key: Key) -> bool:
        """A pass under way brings it."""
        return key in self._claimed

    def add(self, key: Key, part: ScorePart) -> None:
        """The workers hold it from now on."""
        self._claimed.remove(key)
        if part.tokens > self.capacity:
            self._dropped.append(part.part_id)
            return
        self._trim(self.capacity - part.tokens)
        self._held[key], self._keys[part.part_id] = _Held(part), key
        self.tokens += part.tokens

    def drop(self, claims: Iterable[tuple[Key, ScorePart]]) -> None:
        """The passes of these came to nothing."""
        for key, part in claims:
            self._claimed.remove(key)
            self._dropped.append(part.part_id)

    def withdraw(self, parts: Iterable[ScorePart]) -> None:
        """Nobody is to take these parts any more."""
        for key in [self._keys[p.part_id] for p in parts if p.part_id in self._keys]:
            self._withdraw(key)

    def withdraw_all(self) -> None:
        for key in list(self._held):
            self._withdraw(key)

    def dropped(self) -> tuple[int, ...]:
        """Ids that the workers are to drop, once."""
        found, self._dropped = tuple(self._dropped), []
        return found

    def _trim(self, tokens: int) -> None:
        """Down to so many, as far as passes allow."""
        for key in [key for key, held in self._held.items() if not held.passes] if self.tokens > tokens else []:
            if self.tokens > tokens:
                self._withdraw(key)

    def _withdraw(self, key: Key) -> None:
        held = self._held.pop(key)
        del self._keys[held.part.part_id]
        self.tokens -= held.part.tokens
        if held.passes:
            self._withdrawn[held.part.part_id] = held
        else:
            self._dropped.append(held.part.part_id)
