"""When a request's drafts are so often wrong that it should keep more of its context."""

from collections.abc import Sequence

ROUNDS = 4  # in a row that must be bad
SHARE = 0.25  # of their drafts: fewer accepted ones are bad


def wider_ratio(ratio: float, most: float, rounds: Sequence[tuple[int, int]]) -> float | None:
    """Twice the kept fraction, at most ``most``, when the last ``ROUNDS`` of ``rounds`` were bad, or None.

    ``rounds``: drafts and accepted drafts of each round since the context was compressed.
    """
    recent = [(drafted, accepted) for drafted, accepted in rounds if drafted][-ROUNDS:]
    if ratio >= most or len(recent) < ROUNDS:
        return None
    bad = sum(accepted for _, accepted in recent) < SHARE * sum(drafted for drafted, _ in recent)
    return min(2 * ratio, most) if bad else None
