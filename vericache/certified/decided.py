"""What certified rows did, counted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decided:
    """A *decision* is one KV head of one layer at one position. ``tokens`` were fetched from the full cache, of that
    KV head each, in ``num_bytes`` bytes; decisions that ``fallbacks`` counts read all tokens. ``certificates``: the
    largest of every position. ``measured``: true relative errors of what is certified, of decisions drawn for that,
    the largest of their queries; what that took to read is not counted."""

    decisions: int = 0
    fetching: int = 0
    tokens: int = 0
    num_bytes: int = 0
    fallbacks: int = 0
    certificates: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()

    def __add__(self, other: "Decided") -> "Decided":
        """Of other layers, heads or positions."""
        return Decided(
            self.decisions + other.decisions,
            self.fetching + other.fetching,
            self.tokens + other.tokens,
            self.num_bytes + other.num_bytes,
            self.fallbacks + other.fallbacks,
            self.certificates + other.certificates,
            self.measured + other.measured,
        )
