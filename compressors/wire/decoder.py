"""Bytes to a KV cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compressors.wire import rans
from compressors.wire.container import FRAME, HEADER_BYTES, MAX_BYTES, Frame, Geometry, Header, Prelude
from compressors.wire.errors import WireDamageError, WireError
from compressors.wire.lanes import batches, frequencies_of_lanes, from_lanes
from compressors.wire.quantise import by_head, dequantise
from compressors.wire.tables import UInt8, UInt16


def decode(data: bytes, max_bytes: int = MAX_BYTES) -> tuple[Tensor, Tensor]:
    """Keys and values ``[L, H, n, D]`` of a whole message, on the CPU, in the dtype they were encoded from.

    Raises:
        WireError: ``data`` is no message, a damaged one, or its KV takes more than ``max_bytes``.
    """
    decoder = Decoder(max_bytes)
    found = decoder.feed(data)
    decoder.finish()
    assert found is not None
    return found


class Decoder:
    """Decodes one message as it arrives: the tokens of every chunk can be used before the next one is there.

    ``max_bytes`` bounds the decoded KV of the whole message. Once a call has raised, all later ones do.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pending = bytearray()
        self._error: WireError | None = None
        self._head = b""
        self._header: Header | None = None
        self._prelude: Prelude | None = None
        self._freqs: list[UInt16] = []
        self._next = 0  # chunk

    def feed(self, data: bytes) -> tuple[Tensor, Tensor] | None:
        """Keys and values ``[L, H, m, D]`` of the ``m`` tokens that ``data`` completes, which follow those returned
        before; None when it completes no chunk.

        Raises:
            WireError: the bytes so far are no message or a damaged one, or they go on behind its end.
        """
        if self._error is not None:
            raise self._error
        self._pending += data
        try:
            return self._advance()
        except WireError as error:
            self._error = error
            raise

    def finish(self) -> None:
        """Raise WireDamageError unless the whole message has arrived."""
        if self._error is not None:
            raise self._error
        chunks = self._header.geometry.chunks if self._header is not None else None
        if self._next != chunks:
            raise WireDamageError(
                f"the message ends after {self._next} of {chunks or 'an unknown number of'} chunks and "
                f"{len(self._pending)} bytes; send it again"
            )

    def _advance(self) -> tuple[Tensor, Tensor] | None:
        if self._header is None:
            if len(self._pending) < HEADER_BYTES:
                return None
            self._head = self._take(HEADER_BYTES)
            self._header = Header.parse(self._head, self._max_bytes)
        if self._prelude is None:
            if len(self._pending) < self._header.prelude_bytes:
                return None
            self._prelude = Prelude.parse(self._take(self._header.prelude_bytes), self._header)
            self._freqs = self._prelude.frequencies()
        geometry, first, frames = self._header.geometry, self._next, []
        while self._next < geometry.chunks and (frame := self._frame(geometry)) is not None:
            frames.append(frame)
            self._next += 1
        if self._next == geometry.chunks and self._pending:
            raise WireDamageError(f"{len(self._pending)} bytes follow the end of the message, expected none")
        return _decode(geometry, self._prelude, self._freqs, frames, first) if frames else None

    def _frame(self, geometry: Geometry) -> Frame | None:
        """The next frame if all of it is there."""
        if len(self._pending) < FRAME.size:
            return None
        size, _ = FRAME.unpack_from(self._pending)
        least, most = geometry.payload_bytes(self._next)
        if not least <= size <= most:
            raise WireDamageError(f"chunk {self._next} has {size} bytes, expected {least} to {most}; send it again")
        if len(self._pending) < FRAME.size + size:
            return None
        return Frame.parse(self._take(FRAME.size + size), self._head, self._next, geometry)

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._pending)[:size])
        del self._pending[:size]
        return taken


def _decode(
    geometry: Geometry, prelude: Prelude, freqs: Sequence[UInt16], frames: Sequence[Frame], first: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of chunks ``first, first + 1, ...``."""
    layers, heads, bins = geometry.layers, geometry.heads, prelude.rows.bins
    tokens = sum(frame.peaks.shape[1] for frame in frames)
    out = torch.empty(2, layers, heads, tokens, geometry.head_dim, dtype=geometry.dtype, device="cpu")
    start = 0
    for chunks in batches(geometry, first, first + len(frames)):
        batch = [frames[i - first] for i in chunks]
        symbols = _symbols(geometry, prelude, freqs, batch)
        peaks = torch.from_numpy(np.concatenate([f.peaks for f in batch], 1)).view(geometry.dtype)
        if not peaks.isfinite().all() or (peaks < 0).any():
            raise WireDamageError("a peak is negative or not finite, which no encoder writes")
        stop = start + peaks.shape[1]
        for place, row in enumerate(prelude.rows.order):
            lossy = dequantise(torch.from_numpy(symbols[place]), peaks[place], bins[row])
            out[row // layers, row % layers, :, start:stop] = by_head(lossy, heads)
        start = stop
    return out[0], out[1]


def _symbols(geometry: Geometry, prelude: Prelude, freqs: Sequence[UInt16], frames: Sequence[Frame]) -> UInt8:
    """``[rows, tokens, channels]`` of frames of equal length, rows in the order of the message."""
    count, tokens = len(frames), frames[0].peaks.shape[1]
    parts, lane, word = [], 0, [0] * count
    for (_, members), of_group in zip(prelude.rows.groups, freqs, strict=True):
        lanes = slice(lane, lane + len(members) * geometry.row_lanes)
        lengths = np.stack([f.lengths[lanes] for f in frames])
        stops = [w + int(n) for w, n in zip(word, lengths.sum(1, dtype=np.int64), strict=True)]
        found = rans.decode(
            np.concatenate([f.states[lanes] for f in frames]),
            lengths.ravel(),
            np.concatenate([f.words[a:b] for f, a, b in zip(frames, word, stops, strict=True)]),
            frequencies_of_lanes(geometry, of_group, count),
            tokens,
        )
        if found is None:
            raise WireDamageError("a stream does not end as it began: its words are not those that were coded")
        parts.append(from_lanes(geometry, found, count))
        lane, word = lanes.stop, stops
    return np.concatenate(parts)
