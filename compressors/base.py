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
from compressors.poisson import sample
from compressors.rotary import Rotary
from compressors.select import SELECTORS, Kept, top_positions
from compressors.surrogate import Surrogate


@dataclass(frozen=True)
class Shape:
    """The attention geometry of the (rank's share of the) model. ``rotary`` is None where the engine cannot tell one
    rotary embedding that all layers apply; ``surrogates`` are those trained for the model, by method."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    rotary: Rotary | None = field(default=None, compare=False, repr=False)
    surrogates: Mapping[str, Surrogate] = field(default_factory=dict, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class MethodSpec:
    """A method with its parameters: what travels with a request. Hashable and picklable.

    ``ratio`` is the kept fraction of token-heads (the paper's c for a token dropper), ``sinks`` first and
    ``recent`` last context tokens are always kept. ``beta`` is how steep counts ``pyramid`` are. ``selector`` is how a
    head's tokens are chosen by their scores: the best, or by chance (``compressors.poisson``, whose ``power``,
    ``floor`` and ``seed`` these are).
    """

    name: str
    counts: str = "uniform"
    ratio: float = 0.25
    sinks: int = 4
    recent: int = 32
    options: tuple[tuple[str, int], ...] = ()
    beta: float = 20.0
    selector: str = "top"
    power: float = 1.0
    floor: float = 1e-3
    seed: int = 0

    @property
    def forced(self) -> int:
        """Tokens that every head keeps, of a context that has as many."""
        return self.sinks + self.recent

    @property
    def least(self) -> int:
        """Tokens that every head keeps at least, on average: a sample needs one that is not forced."""
        return self.forced + (self.selector != "top")

    def budget(self, num_tokens: int) -> int:
        """Kept tokens per KV head, on average over all (layer, head), of a context of ``num_tokens``: known before any
        score is. The most that are kept where the selector or the method may keep less."""
        return min(num_tokens, max(kept_count(self.ratio, num_tokens, self.sinks, self.recent), self.least))

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
    network: ClassVar[type[Surrogate] | None] = None  # the kind in ``shape.surrogates`` the method needs, if any
    dynamic: ClassVar[bool] = False  # whether ``needed`` or ``narrowed`` may keep less than the ratio allows
    counts: ClassVar[tuple[str, ...]] = COUNTS
    default_counts: ClassVar[str] = "per_head"
    selectors: ClassVar[tuple[str, ...]] = SELECTORS  # only "top" where scores are no weights (ranks, logarithms)
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

    @classmethod
    def own_part(cls, spec: MethodSpec, index: int, num_tokens: int) -> tuple[int, int] | None:
        """Context tokens (start, end) whose scores probe ``index`` alone decides, and which hold for every context that
        begins with the same ``end`` tokens: there ``adopt`` may take the probe's place. None where they do not."""
        return None

    def part(self, start: int, end: int) -> Tensor:
        """Scores ``[L, H, end - start]`` of an ``own_part``, once all probes were seen."""
        raise NotImplementedError(f"{self.name} has no scores that hold for other contexts")

    def adopt(self, start: int, end: int, scores: Tensor) -> None:
        """Take over what another context's ``part`` gave, in place of a probe."""
        raise NotImplementedError(f"{self.name} has no scores that hold for other contexts")

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        """See one layer of probe number ``index``: ``query [T, Hq, D]`` and ``key [T, H, D]``, post-RoPE."""
        raise NotImplementedError(f"{self.name} declares no probes")

    def read(self, layer: int, cached: CachedTokens) -> None:
        """See one layer's context, if ``reads_cache``: once a layer, after all probes and before ``scores``."""
        raise NotImplementedError(f"{self.name} does not read the cache")

    @abstractmethod
    def scores(self) -> Tensor:
        """float32 ``[L, H, n]``, finite."""

    def needed(self) -> Tensor:
        """int64 ``[L, H]``, if ``dynamic``: how many of its best tokens, forced ones first, each head needs."""
        return torch.full((self.shape.layers, self.shape.kv_heads), self.num_tokens)

    def narrowed(self, kept: Kept, scores: Tensor) -> Kept:
        """``kept`` with the bits of each token, and without those that get none (never a forced one), by methods that
        choose widths. ``scores`` are those of the selection, forced tokens at +inf."""
        return kept


class LayerwiseScorer(Scorer):
    """Writes its scores while it sees the layers, into ``_scores`` (float32 ``[L, H, n]``, zero at first)."""

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        self._scores = torch.zeros(shape.layers, shape.kv_heads, num_tokens)

    def scores(self) -> Tensor:
        return self._scores

    def part(self, start: int, end: int) -> Tensor:
        return self._scores[..., start:end].clone()

    def adopt(self, start: int, end: int, scores: Tensor) -> None:
        self._scores[..., start:end] = scores


class Compressor:
    """scorer x budget x selector for one request of ``num_tokens`` context tokens."""

    def __init__(self, scorer: Scorer, spec: MethodSpec) -> None:
        self.scorer, self.spec = scorer, spec

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        self.scorer.observe(layer, index, query, key, cached, scale)

    @property
    def reads_cache(self) -> bool:
        """Whether ``read`` must be called once for every layer before ``select``."""
        return self.scorer.reads_cache and not self._keeps_all

    def read(self, layer: int, cached: CachedTokens) -> None:
        self.scorer.read(layer, cached)

    @property
    def budget(self) -> int:
        """Kept tokens per KV head, on average over all (layer, head)."""
        return self.spec.budget(self.scorer.num_tokens)

    def select(self) -> Kept:
        """Score, allocate counts, choose positions. Exactly ``L * H * budget`` token-heads are kept; at most as many by
        a ``dynamic`` method, and by selector ``poisson``, whose sizes are random."""
        shape, n, spec = self.scorer.shape, self.scorer.num_tokens, self.spec
        if self._keeps_all:
            counts = torch.full((shape.layers, shape.kv_heads), n, dtype=torch.int64)
            certain = None if spec.selector == "top" else torch.ones(1).expand(*counts.shape, n)
            return Kept(counts, torch.arange(n).repeat(counts.numel()), certain)
        scores = self.scorer.scores().float()
        expected = (shape.layers, shape.kv_heads, n)
        if scores.shape != expected or not torch.isfinite(scores).all():
            raise MethodError(
                f"{spec.name} returned scores of shape {tuple(scores.shape)}, "
                f"{'all finite' if torch.isfinite(scores).all() else 'some not finite'}; expected finite {expected}"
            )
        forced = forced_mask(n, spec.sinks, spec.recent)
        scores = scores.masked_fill(forced, float("inf"))
        counts = allocate(scores, self.budget, spec.counts, spec.forced, spec.least - spec.forced, spec.beta)
        if self.scorer.dynamic:
            counts = torch.minimum(counts, self._needed())
        if spec.selector == "top":
            return self.scorer.narrowed(Kept(counts, top_positions(scores, counts)), scores)
        return sample(scores, counts, forced, spec.selector, spec.power, spec.floor, spec.seed)

    @property
    def _keeps_all(self) -> bool:
        """Whatever the scores are."""
        most = self.spec.least if self.scorer.dynamic else self.budget
        return self.scorer.num_tokens <= most

    def _needed(self) -> Tensor:
        needed, shape = self.scorer.needed(), self.scorer.shape
        if needed.shape != (shape.layers, shape.kv_heads) or needed.dtype != torch.int64:
            raise MethodError(
                f"{self.spec.name} needs counts of shape {tuple(needed.shape)} and {needed.dtype}; "
                f"expected {(shape.layers, shape.kv_heads)} and torch.int64"
            )
        return needed.clamp(min=self.spec.least)
