"""Static symbol distributions: what is sent of them, and the frequencies both sides make of that.

A distribution is one byte per symbol: 0, the symbol does not occur, or a number with four bits of mantissa and four
of exponent. That costs about 0.004 bits per coded symbol over exact counts, and half of what 16-bit counts take.
Everything behind the bytes is integer arithmetic, the same on every machine.
"""

import numpy as np
import numpy.typing as npt

PRECISION = 12  # frequencies of one distribution add up to 2^12
TOTAL = 1 << PRECISION
LARGEST = 31 << 15  # weight of byte 255

UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]


def to_bytes(counts: npt.NDArray[np.int64]) -> UInt8:
    """``[channels, symbols]`` counts, each channel with at least one, -> bytes of the same shape."""
    scaled = counts * (LARGEST / counts.max(1, keepdims=True))
    mantissa, exponent = np.frexp(scaled)
    code = (exponent - 5) * 16 + np.rint(mantissa * 32).astype(np.int64) - 16
    return np.where(counts > 0, code.clip(1, 255), 0).astype(np.uint8)


def frequencies(table: UInt8) -> UInt16 | None:
    """``[channels, symbols]`` bytes -> frequencies that add up to ``TOTAL`` in every channel, at least 1 where the byte
    is not 0. None when a channel has no symbol, which no encoder writes."""
    code = table.astype(np.int64)
    present = code > 0
    weight = np.where(present, (16 + (code & 15)) << (code >> 4), 0)
    total = weight.sum(1, keepdims=True)
    if not total.all():
        return None
    # One for every symbol that occurs, the rest by weight: never 0, and what rounding leaves is never negative.
    found = present + weight * (TOTAL - present.sum(1, keepdims=True)) // total
    rows = np.arange(len(found))
    found[rows, weight.argmax(1)] += TOTAL - found.sum(1)
    return found.astype(np.uint16)
