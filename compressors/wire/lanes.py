"""How rows and chunks become lanes of the range coder: what is coded at once, and in which order it lies."""

import numpy as np

from compressors.wire.container import Geometry
from compressors.wire.tables import UInt8, UInt16

AT_ONCE = 8192  # lanes: enough for long vectors, few enough to stay in cache


def batches(geometry: Geometry, start: int, stop: int) -> list[range]:
    """Chunks ``start .. stop - 1`` in runs that are coded together: of equal length, about ``AT_ONCE`` lanes."""
    most = max(1, AT_ONCE // geometry.lanes)
    whole = max(start, min(stop, geometry.tokens // geometry.chunk))  # behind it lies at most one shorter chunk
    runs = [range(first, min(first + most, whole)) for first in range(start, whole, most)]
    return runs + [range(i, i + 1) for i in range(whole, stop)]


def tokens_of(geometry: Geometry, chunks: range) -> slice:
    return slice(chunks.start * geometry.chunk, min(chunks.stop * geometry.chunk, geometry.tokens))


def to_lanes(geometry: Geometry, symbols: UInt8, count: int) -> UInt8:
    """``[rows, count * tokens, channels]`` -> ``[block, tokens, lanes]``; lanes in the order chunk, row, block of
    channels."""
    split = symbols.reshape(len(symbols), count, -1, geometry.row_lanes, geometry.block)
    return np.ascontiguousarray(split.transpose(4, 2, 1, 0, 3)).reshape(geometry.block, split.shape[2], -1)


def from_lanes(geometry: Geometry, lanes: UInt8, count: int) -> UInt8:
    """The inverse of ``to_lanes``."""
    block, tokens, _ = lanes.shape
    split = lanes.reshape(block, tokens, count, -1, geometry.row_lanes)
    return split.transpose(3, 2, 1, 4, 0).reshape(split.shape[3], count * tokens, geometry.channels)


def frequencies_of_lanes(geometry: Geometry, freqs: UInt16, count: int) -> UInt16:
    """Frequencies of rows ``[rows, channels, symbols]`` -> ``[block, symbols, lanes]`` for ``count`` chunks."""
    rows, _, symbols = freqs.shape
    split = freqs.reshape(rows, geometry.row_lanes, geometry.block, symbols).transpose(2, 3, 0, 1)
    return np.tile(split.reshape(geometry.block, symbols, -1), (1, 1, count))
