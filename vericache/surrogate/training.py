"""Training a surrogate on texts, and measuring one on others."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compressors import Surrogate
from vericache.surrogate.fitting import Fitting
from vericache.surrogate.metrics import Agreement
from vericache.surrogate.scoring import Scores
from vericache.surrogate.texts import Text

Advance = Callable[[int], None]  # tokens done


def take_in(scores: Scores, texts: Sequence[Text], fitting: Fitting, advance: Advance = lambda _: None) -> None:
    """Show ``fitting`` the texts. Raises CompressionError for a text that the engine could not score."""
    for piece in (p for t in texts for p in t.pieces):
        scores.of(piece, fitting.add)
        advance(len(piece))


def measure(
    scores: Scores, surrogate: Surrogate, texts: Sequence[Text], advance: Advance = lambda _: None
) -> Agreement:
    """How well ``surrogate`` predicts what KVzip gives the texts. Raises CompressionError as ``take_in`` does."""
    agreement = Agreement()
    for piece in (p for t in texts for p in t.pieces):
        predicted, wanted = list[Tensor](), list[Tensor]()

        def see(layer: int, features: Tensor, log_scores: Tensor) -> None:
            predicted.append(surrogate.to(features.device).predict(layer, features))  # noqa: B023 called at once
            wanted.append(log_scores)  # noqa: B023

        scores.of(piece, see)
        agreement.add(torch.stack(predicted), torch.stack(wanted))
        advance(len(piece))
    return agreement
