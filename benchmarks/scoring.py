"""Scoring passes on the reference model, where there is no engine to run them."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from compressors import METHODS, CachedTokens, Compressor
from tests.reference import Past, Reference, Row


class WatchedRow(Row):
    """``see`` gets what ``attend`` gets."""

    def __init__(self, ids: Sequence[int], past: Past, see: Callable[..., None], own: Past | None = None) -> None:
        super().__init__(ids, past.length + (own.length if own is not None else 0), [past], own)
        self._see = see

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self._see(layer, query, key, scale)
        return super().attend(layer, query, key, value, scale)


def score(
    reference: Reference, compressor: Compressor, tokens: Sequence[int], past: Past, texts: Mapping[str, Sequence[int]]
) -> None:
    """Show the ``compressor`` all that an engine would: the rows of its scoring pass over a context of ``tokens``,
    whose KV is ``past``, and each layer's keys and values if it reads them."""
    spec = compressor.spec
    for index, probe in enumerate(METHODS[spec.name].probes(tokens, spec, texts)):
        before = past.part(0, probe.start)
        reference.forward([WatchedRow(probe.tokens, before, _observing(compressor, index, past))])
    if compressor.reads_cache:
        for layer in range(len(past.keys)):
            compressor.read(layer, _cached(past, layer))


def _observing(compressor: Compressor, index: int, past: Past) -> Callable[..., None]:
    def see(layer: int, query: Tensor, key: Tensor, scale: float) -> None:
        compressor.observe(layer, index, query.transpose(0, 1), key.transpose(0, 1), _cached(past, layer), scale)

    return see


def _cached(past: Past, layer: int) -> CachedTokens:
    return CachedTokens(lambda at: past.keys[layer][:, at], lambda at: past.values[layer][:, at])
