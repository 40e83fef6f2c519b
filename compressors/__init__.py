"""KV cache compressors: one method per file, a registry, one budget helper.

A method is a *scorer* (how much does a cached token matter to each KV head); a *budget* turns scores into
counts per (layer, KV head); a *selector* turns counts into kept positions. Only torch is imported here.

Notation in docstrings: L layers, H KV heads, G query heads per KV head (``Hq = G * H``), D head size,
n context tokens. Scores are float32 ``[L, H, n]``, larger is more important.
"""

from compressors.base import Compressor, LayerwiseScorer, MethodSpec, Probe, Scorer, Shape
from compressors.cached import Asked, CachedTokens
from compressors.errors import MethodError
from compressors.registry import METHODS, create, describe, find, validate
from compressors.rotary import Rotary
from compressors.select import Kept
from compressors.surrogate import Surrogate

__all__ = [
    "METHODS",
    "Asked",
    "CachedTokens",
    "Compressor",
    "Kept",
    "LayerwiseScorer",
    "MethodError",
    "MethodSpec",
    "Probe",
    "Rotary",
    "Scorer",
    "Shape",
    "Surrogate",
    "create",
    "describe",
    "find",
    "validate",
]
