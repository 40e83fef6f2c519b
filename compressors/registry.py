"""The methods by name. A new method is one file and one entry here, or an entry point of another distribution."""

from collections.abc import Iterable
from difflib import get_close_matches

from compressors.base import Compressor, MethodSpec, Scorer, Shape
from compressors.dbudgetkv import DBudgetKV
from compressors.duo_attention import DuoAttention
from compressors.errors import MethodError
from compressors.expected_attention import ExpectedAttention
from compressors.fast_kvzip import FastKVzip
from compressors.h2o import H2O
from compressors.keydiff import KeyDiff
from compressors.knorm import KNorm
from compressors.kvzap import KVzap
from compressors.kvzip import KVzip
from compressors.lagkv import LagKV
from compressors.plugins import Methods
from compressors.pyramidkv import PyramidKV
from compressors.qfilter import QFilter
from compressors.random import Random
from compressors.rdkv import RDKV
from compressors.rkv import RKV
from compressors.rocketkv import RocketKV
from compressors.snapkv import SnapKV
from compressors.streaming_llm import StreamingLLM
from compressors.tova import TOVA

BUILTIN: tuple[type[Scorer], ...] = (
    StreamingLLM, SnapKV, PyramidKV, DBudgetKV, RocketKV, TOVA, RKV, ExpectedAttention, QFilter, H2O, KVzip,
    KVzap, FastKVzip, RDKV, DuoAttention, KNorm, KeyDiff, LagKV, Random,
)  # fmt: skip
METHODS = Methods(BUILTIN)


def find(name: str) -> type[Scorer]:
    """The method of that name. Raises MethodError with the nearest one."""
    _known("compressor", name, METHODS)
    return METHODS[name]


def validate(spec: MethodSpec) -> type[Scorer]:
    """The scorer class of ``spec``. Raises MethodError with the nearest name or the allowed values."""
    method = find(spec.name)
    if spec.counts not in method.counts:
        raise MethodError(
            f"compressor {spec.name!r} cannot allocate counts {spec.counts!r}: "
            f"its scores allow {', '.join(method.counts)}"
        )
    if spec.selector not in method.selectors:
        raise MethodError(
            f"compressor {spec.name!r} cannot select by {spec.selector!r}: "
            f"its scores allow {', '.join(method.selectors)}"
        )
    if not (spec.power > 0 and 0 < spec.floor <= 1 and 0 <= spec.seed < 2**32):
        raise MethodError(
            f"a random selector takes power > 0, floor in (0, 1] and seed in 0..2**32 - 1, "
            f"got {spec.power}, {spec.floor} and {spec.seed}"
        )
    if not 0 < spec.ratio <= 1:
        raise MethodError(f"ratio must lie in (0, 1], got {spec.ratio}")
    if spec.sinks < 0 or spec.recent < 1:
        raise MethodError(f"sinks must be >= 0 and recent >= 1, got {spec.sinks} and {spec.recent}")
    if not spec.beta >= 1:
        raise MethodError(f"beta of a pyramid must be at least 1 (uniform counts), got {spec.beta}")
    for option, _ in spec.options:
        _known(f"{spec.name} option", option, method.options)
    method.check(spec)
    return method


def _known(kind: str, name: str, names: Iterable[str]) -> None:
    names = list(names)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
        raise MethodError(f"unknown {kind} {name!r}; {hint}")


def create(spec: MethodSpec, shape: Shape, num_tokens: int) -> Compressor:
    """A compressor for one request of ``num_tokens`` context tokens. Raises MethodError as ``validate`` does, and where
    the method needs something of the model that ``shape`` does not have."""
    method = validate(spec)
    if num_tokens < 1:
        raise MethodError(f"{spec.name} was given a context of {num_tokens} tokens, expected at least 1 to keep")
    if method.needs_rotary and shape.rotary is None:
        raise MethodError(
            f"{spec.name} turns keys and queries to other positions, and this model has no single rotary embedding "
            f"that all its layers apply; choose a method that needs none"
        )
    if method.network is not None and spec.name not in shape.surrogates:
        given = ", ".join(shape.surrogates) or "none"
        raise MethodError(
            f"{spec.name} needs a surrogate that was trained for it and the model, loaded are those of: {given}; set "
            f"surrogate to its file"
        )
    return Compressor(method(shape, num_tokens, spec), spec)


def describe() -> list[tuple[str, str, str]]:
    """(name, count modes, summary) of every method, for tables."""
    return [(m.name, ", ".join(m.counts), m.summary) for m in METHODS.values()]
