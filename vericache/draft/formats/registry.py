"""The page formats by name. A new one is one file and one entry here."""

from collections.abc import Callable, Sequence

import torch

from compressors.bits import Pair
from vericache.draft.formats.base import PageFormat
from vericache.draft.formats.kivi import Kivi
from vericache.draft.formats.kvquant import KVQuant, KVQuantPages
from vericache.draft.formats.mixed import Mixed
from vericache.draft.formats.plain import Plain
from vericache.draft.formats.rotatekv import RotateKV
from vericache.draft.formats.turboquant import TurboQuant
from vericache.errors import ConfigError

FORMATS: dict[str, Callable[[int, int, torch.dtype], PageFormat]] = {
    "plain": Plain,
    **{f"turboquant{b}": lambda *args, b=b: TurboQuant(b, *args) for b in (4, 3, 2)},
    **{f"kivi{b}": lambda *args, b=b: Kivi(b, *args) for b in (4, 2)},
    **{f"rotatekv{b}": lambda *args, b=b: RotateKV(b, *args) for b in (4, 2)},
    **{f"kvquant{b}": lambda *args, b=b: KVQuantPages(KVQuant(b, *args)) for b in (4, 3, 2)},
    "turboquant_mixed": Mixed,
}


def page_format(
    name: str, page_tokens: int, head_dim: int, dtype: torch.dtype, layer_bits: Sequence[Pair] = ()
) -> PageFormat:
    """The format called ``name`` for heads of size ``head_dim`` in a model of ``dtype``. ``layer_bits``: of its layers,
    for the format that has widths per layer.

    Raises:
        ConfigError: heads or pages of this size do not fit the format.
    """
    if name != "plain" and (head_dim % 8 or page_tokens % 8):
        raise ConfigError(
            f"page_format {name} packs heads and pages whose sizes are multiples of 8, got head size {head_dim} and "
            f"page_tokens {page_tokens}; set page_tokens to 32, or page_format to plain"
        )
    found = FORMATS[name](page_tokens, head_dim, dtype)
    found.name = name
    if isinstance(found, Mixed):
        found.layer_bits = layer_bits
    return found
