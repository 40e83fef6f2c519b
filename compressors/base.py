"""What a compression method is, and how its parts compose."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from compressors.budget import COUNTS, allocate, forced_mask, kept_count
from compressors.cached import CachedTokens
from compressors.errors import MethodError
from compressors.rotary import Rotary
from compressors.select import top_positions
from compressors.surrogate import Surrogate


@dataclass(frozen=True)
class Shape:
    """The attention geometry of the (rank's share of the) model. ``rotary`` is None where the engine cannot tell one
    rotary embedding that all layers apply, ``surrogate`` where none was trained for the model."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    rotary: Rotary | None = field(default=None, compare=False, repr=False)
    surrogate: Surrogate | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class MethodSpec:
    """A method with its parameters: what travels with a request. Hashable and picklable.

    ``ratio`` is the kept fraction of token-heads (the paper's c for a token dropper), ``sinks`` first and
    ``recent`` last context tokens are always kept.
    """

    name: str
    counts: str = "uniform"
    ratio: float = 0.25
    sinks: int = 4
    recent: int = 32
    options: tuple[tuple[str, int], ...] = ()

    def with_option(self, name: str, value: int) -> "MethodSpec":
        return replace(self, options=tuple(sorted({**dict(self.options), name: value}.items())))


@dataclass(frozen=True)
class Probe:
    """One extra row of a scoring pass: ``tokens`` at positions ``start, start + 1, ...`` on top of the full KV.

    A probe that starts inside the context (``start < n``) replays known tokens to see their queries: its K/V
    exist already and are not written again. A probe that starts at ``n`` appends new tokens, whose K/V live
    behind the context until the pass ends.
    """

    tokens: tuple[int, ...]
    start: int


class Scorer(ABC):
    """Scores the cached tokens of one request. Subclasses are registered in ``compressors.registry``."""

    name: ClassVar[str]
    summary: ClassVar[str]
    # Whether scores depend on the prompt's last question. Those that do not can be reused for a shared prefix.
    query_aware: ClassVar[bool]
    reads_cache: ClassVar[bool] = False  # whether ``read`` wants to see every layer's keys and values
    needs_rotary: ClassVar[bool] = False  # whether the method cannot do without ``shape.rotary``
    network: ClassVar[type[Surrogate] | None] = None  # the kind of ``shape.surrogate`` that the method needs, if any
    counts: ClassVar[tuple[str, ...]] = COUNTS
    options: ClassVar[Mapping[str, int]] = {}  # the method's own options and their defaults
    # Instruction texts the scoring pass needs as token ids: key -> text (see ``probes``).
    texts: ClassVar[Mapping[str, str]] = {}

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        self.shape, self.num_tokens, self.spec = shape, num_tokens, spec

    @classmethod
    def option(cls, spec: MethodSpec, name: str) -> int:
        return int(dict(spec.options).get(name, cls.options[name]))

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        """Raise MethodError when an option value does not fit; names are checked by the registry."""

    @classmethod
    def fit(cls, spec: MethodSpec, row_tokens: int) -> MethodSpec:
        """``spec`` with options changed, if need be, so that no probe is longer than ``row_tokens``.

        Raises MethodError when no choice of options is.
        """
        return spec

    @classmethod
    def appended_tokens(cls, spec: MethodSpec, num_tokens: int) -> int:
        """The most tokens a probe appends behind a context of ``num_tokens`` (replaying probes append none)."""
        return 0

    @classmethod
    def probes(cls, token_ids: Sequence[int], spec: MethodSpec, texts: Mapping[str, Sequence[int]]) -> list[Probe]:
        """The rows the scoring pass runs, in order; none when the method needs no queries.

        ``texts`` holds the token ids of ``cls.texts`` and of ``"turn"``, the text between a user's message and
        the model's answer.
        """
        return []

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        """See one layer of probe number ``index``: ``query [T, Hq, D]`` and ``key [T, H, D]``, post-RoPE."""
        raise NotImplementedError(f"{self.name} declares no probes")

    def read(self, layer: int, cached: CachedTokens) -> None:
        """See one layer's context, if ``reads_cache``: once a layer, after all probes and before ``scores``."""
        raise NotImplementedError(f"{self.name} does not read the cache")

    @abstractmethod
    def scores(self) -> Tensor:
        """float32 ``[L, H, n]``, finite."""


@dataclass(frozen=True)
class Kept:
    """The selection, ragged over (layer, KV head): ``counts`` int64 ``[L, H]`` and ``positions`` int64
    ``[counts.sum()]``, ordered by layer, head, position."""

    counts: Tensor
    positions: Tensor

    def layer(self, index: int) -> Tensor:
        """Positions of one layer, ordered by head then position."""
        per_layer = self.counts.sum(1)
        start = int(per_layer[:index].sum())
        return self.positions[start : start + int(per_layer[index])]


class Compressor:
    """scorer x budget x selector for one request of ``num_tokens`` context tokens."""

    def __init__(self, scorer: Scorer, spec: MethodSpec) -> None:
        self.scorer, self.spec = scorer, spec

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        self.scorer.observe(layer, index, query, key, cached, scale)

    @property
    def reads_cache(self) -> bool:
        """Whether ``read`` must be called once for every layer before ``select``."""
        return self.scorer.reads_cache and self.budget < self.scorer.num_tokens

    def read(self, layer: int, cached: CachedTokens) -> None:
        self.scorer.read(layer, cached)

    @property
    def budget(self) -> int:
        """Kept tokens per KV head, on average over all (layer, head): known before any score is."""
        return kept_count(self.spec.ratio, self.scorer.num_tokens, self.spec.sinks, self.spec.recent)

    def select(self) -> Kept:
        """Score, allocate counts, choose positions. Exactly ``L * H * budget`` token-heads are kept."""
        shape, n = self.scorer.shape, self.scorer.num_tokens
        if self.budget == n:
            counts = torch.full((shape.layers, shape.kv_heads), n, dtype=torch.int64)
            return Kept(counts, torch.arange(n).repeat(shape.layers * shape.kv_heads))
        scores = self.scorer.scores().float()
        expected = (shape.layers, shape.kv_heads, n)
        if scores.shape != expected or not torch.isfinite(scores).all():
            raise MethodError(
                f"{self.spec.name} returned scores of shape {tuple(scores.shape)}, "
                f"{'all finite' if torch.isfinite(scores).all() else 'some not finite'}; expected finite {expected}"
            )
        scores = scores.masked_fill(forced_mask(n, self.spec.sinks, self.spec.recent), float("inf"))
        counts = allocate(scores, self.budget, self.spec.counts, self.spec.sinks + self.spec.recent)
        return Kept(counts, top_positions(scores, counts))
