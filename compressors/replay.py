"""Methods that look at the queries of a context's last tokens."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from compressors.base import LayerwiseScorer, MethodSpec, Probe
from compressors.errors import MethodError


class Replay(LayerwiseScorer):
    """One scoring row replays the context's last tokens on the finished context, so that their queries do not depend on
    how the prompt was chunked or how much of it was a prefix-cache hit. Fewer tokens where the row holds fewer."""

    length: ClassVar[str]  # the option that says how many tokens

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        if cls.option(spec, cls.length) < 1:
            raise MethodError(
                f"{cls.name}: option {cls.length!r} must be at least 1, got {cls.option(spec, cls.length)}"
            )

    @classmethod
    def fit(cls, spec: MethodSpec, row_tokens: int) -> MethodSpec:
        if row_tokens < 1:
            raise MethodError(f"{cls.name} needs a scoring row of at least 1 token, {row_tokens} fit in a step")
        return spec.with_option(cls.length, min(cls.option(spec, cls.length), row_tokens))

    @classmethod
    def probes(cls, token_ids: Sequence[int], spec: MethodSpec, texts: Mapping[str, Sequence[int]]) -> list[Probe]:
        start = max(len(token_ids) - cls.option(spec, cls.length), 0)
        return [Probe(tuple(token_ids[start:]), start)]


class WindowReplay(Replay):
    """The tokens before the last ``window`` are scored by what those look at. The window must lie in the forced recent
    tokens, whose own scores are never read."""

    query_aware = True
    length = "window"
    # What a few queries look at sums to one in every head, so it says little about which head needs more. Measured in
    # docs/results/acceptance.md: one threshold for all heads costs snapkv, rocketkv, tova and rkv accepted drafts.
    default_counts = "uniform"

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        window = cls.option(spec, "window")
        if not 1 <= window <= spec.recent:
            raise MethodError(f"{cls.name}: option 'window' must lie in 1..recent ({spec.recent}), got {window}")


def check_kernel(name: str, kernel: int) -> None:
    """A pooling kernel is centred on its token. Raises MethodError."""
    if kernel < 1 or kernel % 2 == 0:
        raise MethodError(f"{name}: option 'kernel' must be odd and positive, got {kernel}")
