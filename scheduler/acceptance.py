"""What a round yields, from how often drafts are right."""

from dataclasses import dataclass

FALL = 1.2  # of wrong drafts with the kept share: see ``Acceptance``
_STEPS = 60  # of bisection: more than a double has bits


def accepted(chance: float, drafts: int) -> float:
    """Drafts accepted per round of ``drafts``, when each is right with ``chance`` if those before it are:
    p + p^2 + ... + p^x = p (1 - p^x) / (1 - p)."""
    if chance >= 1:
        return float(drafts)
    return min(float(drafts), chance * (1 - chance**drafts) / (1 - chance))  # next to 1 rounding may exceed x


def chance_of(share: float, drafts: int) -> float:
    """The inverse: the chance with which ``share`` of a round of ``drafts`` is accepted."""
    if not 0 <= share <= 1 or drafts < 1:
        raise ValueError(f"expected a share in [0, 1] and at least 1 draft, got {share} and {drafts}")
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle, drafts) < share * drafts else (low, middle)
    return high


@dataclass(frozen=True)
class Acceptance:
    """``share`` (gamma) of a round of ``drafts`` is accepted when ``ratio`` of the context is kept.

    For other ratios r the chance of a wrong draft is taken to be proportional to r^-1.2: KVzip with counts per head on
    SmolLM2-135M agrees with full KV in 0.991, 0.980, 0.926 and 0.853 of tokens at ratio 0.5, 0.25, 0.1 and 0.05.
    """

    share: float
    drafts: int
    ratio: float

    def __post_init__(self) -> None:
        chance_of(self.share, self.drafts)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"expected a ratio in (0, 1], got {self.ratio}")

    def gained(self, ratio: float, drafts: int) -> float:
        """Tokens that a verify yields (A)."""
        wrong = (1 - chance_of(self.share, self.drafts)) * (self.ratio / ratio) ** FALL
        return 1 + accepted(max(0.0, 1 - wrong), drafts)


USUAL = Acceptance(0.64, 25, 0.25)  # until it is measured: KVzip per head on SmolLM2-135M (docs/results/acceptance.md)
