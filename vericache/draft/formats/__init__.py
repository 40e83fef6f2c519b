"""How the tokens of a head page are stored: in the model's dtype, or packed into a few bits.

A format turns the keys and values of up to ``page_tokens`` tokens of one head into ``page_bytes`` bytes and back. Codes
may live in a rotated space: queries are turned into it once per step and outputs are turned back once, instead of
every key and value (softmax attention is linear in values, and a rotation keeps inner products).
"""

from vericache.draft.formats.base import PageFormat, pages_per_head, valid_tokens
from vericache.draft.formats.kvquant import Frozen
from vericache.draft.formats.mixed import Mixed
from vericache.draft.formats.packing import pack, unpack
from vericache.draft.formats.plain import Plain
from vericache.draft.formats.registry import FORMATS, page_format
from vericache.draft.formats.rotation import hadamard, rotation
from vericache.draft.formats.simulated import LayerTokens, Simulated
from vericache.draft.formats.turboquant import TurboQuant

__all__ = [
    "FORMATS", "Frozen", "LayerTokens", "Mixed", "PageFormat", "Plain", "Simulated", "TurboQuant", "hadamard", "pack",
    "page_format", "pages_per_head", "rotation", "unpack", "valid_tokens",
]  # fmt: skip
