"""KVzip (Kim et al., 2025): what the model looks at when it repeats its own context."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from compressors.base import LayerwiseScorer, MethodSpec, Probe, Shape
from compressors.cached import Asked, CachedTokens
from compressors.errors import MethodError

_OVERLAP = 8  # tokens of the previous chunk that tell the model where to start
_ASK = 64  # room for the instruction around a chunk


class KVzip(LayerwiseScorer):
    """Maximum attention each cached token receives while the context is reconstructed chunk by chunk, over the
    queries of the reconstruction and the query heads of a KV head. Query-agnostic; scores are comparable across
    heads and layers, so one global threshold (``per_head``) is the method's own rule.

    Option ``chunk``: context tokens per reconstruction row (the paper uses up to 2048).
    """

    name = "kvzip"
    summary = "attention received while the context is repeated; one extra forward pass"
    query_aware = False
    options: ClassVar[Mapping[str, int]] = {"chunk": 1024}
    texts: ClassVar[Mapping[str, str]] = {
        "first": "\n\nRepeat the previous context exactly.",
        "next": "\n\nRepeat the part of the previous context exactly, starting with",
    }

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        self._chunk = self.option(spec, "chunk")

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        if cls.option(spec, "chunk") < _OVERLAP:
            raise MethodError(
                f"{cls.name}: option 'chunk' must be at least {_OVERLAP}, got {cls.option(spec, 'chunk')}"
            )

    @classmethod
    def fit(cls, spec: MethodSpec, row_tokens: int) -> MethodSpec:
        chunk = min(cls.option(spec, "chunk"), row_tokens - _ASK)
        if chunk < _OVERLAP:
            raise MethodError(
                f"{cls.name} needs scoring rows of at least {_ASK + _OVERLAP} tokens behind the context, "
                f"{row_tokens} fit"
            )
        return spec.with_option("chunk", chunk)

    @classmethod
    def appended_tokens(cls, spec: MethodSpec, num_tokens: int) -> int:
        return min(cls.option(spec, "chunk"), num_tokens) + _ASK

    @classmethod
    def probes(cls, token_ids: Sequence[int], spec: MethodSpec, texts: Mapping[str, Sequence[int]]) -> list[Probe]:
        n, chunk = len(token_ids), cls.option(spec, "chunk")
        rows = []
        for start in range(0, n, chunk):
            ask = list(texts["first"]) if start == 0 else [*texts["next"], *token_ids[max(start - _OVERLAP, 0) : start]]
            rows.append(Probe((*ask, *texts["turn"], *token_ids[start : start + chunk]), n))
        return rows

    @classmethod
    def own_part(cls, spec: MethodSpec, index: int, num_tokens: int) -> tuple[int, int] | None:
        """A chunk. Its row stands behind the whole context, so the scores of another context with this beginning are
        not the same numbers, but as good: what comes behind a chunk is no part of the question."""
        start = index * cls.option(spec, "chunk")
        return start, min(start + cls.option(spec, "chunk"), num_tokens)

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        start = index * self._chunk
        stop = min(start + self._chunk, self.num_tokens)
        sinks = min(self.spec.sinks, start)  # keys that keep the softmax honest; part of the chunk when it is the first
        asked = Asked(start, stop, sinks, "max")
        self._scores[layer, :, start:stop] = cached.attention_received(query, key, asked, scale)
