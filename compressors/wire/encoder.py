"""A KV cache to bytes."""

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from compressors.base import MethodError
from compressors.wire import rans
from compressors.wire.container import MAX_CHUNK, Array, Frame, Geometry, Header, Prelude, Rows
from compressors.wire.lanes import batches, frequencies_of_lanes, to_lanes, tokens_of
from compressors.wire.quantise import Bins, by_token, checked, quantise
from compressors.wire.tables import UInt8, to_bytes

BITS = {2: torch.int16, 4: torch.int32}  # numpy knows no bfloat16: peaks travel as the bits they are


def encode(keys: Tensor, values: Tensor, bins: Bins | None = None, chunk: int = 256) -> bytes:
    """One message that holds ``fake_quant(keys, values, bins)``.

    Args:
        keys, values: ``[L, H, n, D]``, finite, bfloat16, float16 or float32, on any device.
        bins: bins per layer; ``Bins.of(L)`` unless given.
        chunk: tokens that are decoded together, the grain of a message that is decoded as it arrives.

    Raises:
        MethodError: the tensors, bins or chunk do not fit.
    """
    bins = checked(keys, values, bins)
    if not 1 <= chunk <= MAX_CHUNK:
        raise MethodError(f"chunks of {chunk} tokens, expected 1 to {MAX_CHUNK}")
    layers, heads, tokens, dim = keys.shape
    geometry, rows = Geometry(keys.dtype, layers, heads, dim, tokens, chunk), Rows((*bins.keys, *bins.values))
    symbols = np.empty((len(rows.bins), tokens, geometry.channels), np.uint8)
    peaks = np.empty((len(rows.bins), tokens), geometry.peaks_dtype)
    for row, of_row in enumerate(rows.bins):
        coded, peak = quantise(by_token(keys[row] if row < layers else values[row - layers]), of_row)
        symbols[row] = coded.cpu().numpy()
        peaks[row] = peak.cpu().view(BITS[keys.dtype.itemsize]).numpy()
    prelude = Prelude(rows, [_distributions(symbols[members], b) for b, members in rows.groups])
    packed = prelude.to_bytes()
    header = Header(geometry, len(packed), zlib.crc32(packed)).to_bytes()
    frames = _frames(geometry, prelude, symbols, peaks)
    return b"".join([header, packed, *(f.to_bytes(header, i) for i, f in enumerate(frames))])


def _distributions(symbols: UInt8, bins: int) -> UInt8:
    """Of symbols ``[rows, n, channels]``: bytes ``[rows, channels, bins - 1]``."""
    rows, _, channels = symbols.shape
    first = np.arange(channels) * (bins - 1)
    counts = [np.bincount((row + first).ravel(), minlength=channels * (bins - 1)) for row in symbols]
    return to_bytes(np.concatenate(counts).reshape(-1, bins - 1)).reshape(rows, channels, -1)


def _frames(geometry: Geometry, prelude: Prelude, symbols: UInt8, peaks: Array) -> Iterator[Frame]:
    freqs = prelude.frequencies()
    for chunks in batches(geometry, 0, geometry.chunks):
        count, span = len(chunks), tokens_of(geometry, chunks)
        states, lengths, words = [], [], []  # of each group of rows, [count, lanes]; words [count][...]
        for (_, members), of_group in zip(prelude.rows.groups, freqs, strict=True):
            lanes = to_lanes(geometry, symbols[members, span], count)
            state, length, word = rans.encode(lanes, frequencies_of_lanes(geometry, of_group, count))
            states.append(state.reshape(count, -1))
            lengths.append(length.reshape(count, -1))
            words.append(np.split(word, np.cumsum(lengths[-1].sum(1, dtype=np.int64))[:-1]))
        ranges = peaks[prelude.rows.order, span].reshape(len(peaks), count, -1)
        for i in range(count):
            yield Frame(
                ranges[:, i],
                np.concatenate([part[i] for part in lengths]),
                np.concatenate([part[i] for part in states]),
                np.concatenate([part[i] for part in words]),
            )
