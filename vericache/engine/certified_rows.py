"""Certified decode on a worker: what both kinds of it have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from compressors import Kept
from vericache.certified.decided import Decided
from vericache.draft.arena import DraftArena
from vericache.draft.step import CertifiedToken
from vericache.engine.ops import Compress
from vericache.engine.pages import PageLayout
from vericache.store.host import HostStore


@dataclass
class CertifiedRows(ABC):
    """Owns what certified slots hold beside the arena, and counts what their rows did. ``measured``: share of
    (position, layer) that is also computed densely."""

    arena: DraftArena
    layout: PageLayout
    caches: list[Tensor]
    store: HostStore
    measured: float
    _random: Random = field(default_factory=lambda: Random(0))

    @abstractmethod
    def fill(self, op: Compress, kept: Kept, blocks: Tensor) -> None:
        """The slot has been filled with ``kept``, from the context in ``blocks``.

        Raises:
            CompressionError: keys or values that are not finite.
        """

    @abstractmethod
    def drop(self, slot: int) -> None:
        """The slot is empty; one that was never filled is left alone."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Of sketches, probabilities and norms: what certified decode holds beside the arena."""

    @abstractmethod
    def attend(self, asked: CertifiedToken, layer: int, query: Tensor, scale: float) -> Tensor:
        """``query [Hq, D]`` -> float32 ``[Hq, D]``."""

    @abstractmethod
    def take(self) -> dict[str, Decided]:
        """What the rows of this step did, by request."""

    @property
    def token_bytes(self) -> int:
        """Of a token of one KV head, as it is fetched."""
        return 2 * self.arena.shape.head_dim * self.store.data.element_size()

    def _is_measured(self) -> bool:
        """Drawn: every so many would favour some layers."""
        return self._random.random() < self.measured
