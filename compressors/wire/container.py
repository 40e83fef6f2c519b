"""The bytes of a message, and every check that comes before they are used.

    header   magic, version, dtype, chunk, layers, heads, head size, tokens, size and CRC-32 of the prelude; CRC-32
    prelude  bins of keys and of values, uint16 [2 L]; distributions, one byte per symbol: [row][channel][symbol]
    frames   one per chunk of tokens: size, CRC-32 (of the header, the frame's number and size, and the payload)
             payload: peaks [row][token] in the tensors' dtype; words per lane, uint16; states of the lanes, uint32;
             words of all lanes, uint16

A row is one layer's keys or values, rows with few bins first (a stable order): lanes of equal alphabets lie side by
side. A lane is ``block`` channels of a row. Everything is little-endian. No size is believed before its CRC-32 is
right, none may exceed what its neighbours allow, and nothing is allocated that is not bounded by the bytes at hand or
by ``max_bytes``.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from compressors.wire.errors import WireDamageError, WireFormatError
from compressors.wire.quantise import DTYPES, FEWEST, MOST
from compressors.wire.rans import UInt32
from compressors.wire.tables import UInt8, UInt16, frequencies

Array = npt.NDArray[np.signedinteger]
MAGIC, VERSION = b"VCKV", 1
HEADER = struct.Struct("<4sHBxIIIIQQI")
HEADER_BYTES = HEADER.size + 4  # and its CRC-32
FRAME = struct.Struct("<QI")
BLOCK = 16  # channels of a lane at most
MAX_CHUNK = 4096  # tokens: a lane's words are counted in 16 bits
MAX_BYTES = 1 << 32  # of decoded KV, unless the caller says otherwise


@dataclass(frozen=True)
class Geometry:
    """Shapes of a message: ``layers``, KV ``heads``, ``head_dim``, ``tokens``, tokens of a ``chunk``."""

    dtype: torch.dtype
    layers: int
    heads: int
    head_dim: int
    tokens: int
    chunk: int

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def block(self) -> int:
        """Channels of a lane: all lanes have as many."""
        return math.gcd(self.channels, BLOCK)

    @property
    def row_lanes(self) -> int:
        return self.channels // self.block

    @property
    def lanes(self) -> int:
        return 2 * self.layers * self.row_lanes

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    def chunk_tokens(self, index: int) -> int:
        return min(self.chunk, self.tokens - index * self.chunk)

    @property
    def peaks_dtype(self) -> str:
        return f"<i{self.dtype.itemsize}"

    @property
    def num_bytes(self) -> int:
        """Of the decoded keys and values."""
        return 2 * self.layers * self.channels * self.tokens * self.dtype.itemsize

    def payload_bytes(self, index: int) -> tuple[int, int]:
        """The fewest and the most bytes of a frame's payload: without words, and with one for every symbol."""
        tokens = self.chunk_tokens(index)
        fixed = 2 * self.layers * tokens * self.dtype.itemsize + 6 * self.lanes
        return fixed, fixed + 2 * self.lanes * self.block * tokens


@dataclass(frozen=True)
class Header:
    geometry: Geometry
    prelude_bytes: int
    prelude_crc: int

    def to_bytes(self) -> bytes:
        g = self.geometry
        sizes = (g.chunk, g.layers, g.heads, g.head_dim, g.tokens, self.prelude_bytes, self.prelude_crc)
        packed = HEADER.pack(MAGIC, VERSION, DTYPES.index(g.dtype), *sizes)
        return packed + struct.pack("<I", zlib.crc32(packed))

    @classmethod
    def parse(cls, data: bytes, max_bytes: int) -> "Header":
        magic, version, dtype, chunk, layers, heads, dim, tokens, size, prelude_crc = HEADER.unpack(data[:-4])
        if magic != MAGIC:
            raise WireFormatError(f"the first bytes are {magic!r}, expected {MAGIC!r}: not a KV message")
        if version != VERSION:
            raise WireFormatError(f"version {version}, expected {VERSION}: encode with the same release as decodes")
        if data[-4:] != struct.pack("<I", zlib.crc32(data[:-4])):
            raise WireDamageError("the header's CRC-32 is wrong; send the message again")
        if dtype >= len(DTYPES) or not 1 <= chunk <= MAX_CHUNK or 0 in (layers, heads, dim, tokens):
            raise WireDamageError(
                f"the header names dtype {dtype}, chunks of {chunk} tokens and shape {(layers, heads, tokens, dim)}, "
                f"expected a dtype below {len(DTYPES)}, chunks of 1 to {MAX_CHUNK} tokens and no empty dimension"
            )
        geometry = Geometry(DTYPES[dtype], layers, heads, dim, tokens, chunk)
        if geometry.num_bytes > max_bytes:
            raise WireFormatError(
                f"decoded, the KV takes {geometry.num_bytes} bytes, allowed are {max_bytes}; raise max_bytes if the "
                "sender is trusted"
            )
        least, most = (2 * layers * (2 + geometry.channels * (b - 1)) for b in (FEWEST, MOST))
        if not least <= size <= most:
            raise WireDamageError(f"a prelude of {size} bytes, expected {least} to {most} for the header's shape")
        return cls(geometry, size, prelude_crc)


@dataclass(frozen=True)
class Rows:
    """Bins of the ``2 L`` rows (keys, then values), and how rows lie in a message."""

    bins: tuple[int, ...]

    @cached_property
    def order(self) -> list[int]:
        """Row numbers in the order of the message."""
        return sorted(range(len(self.bins)), key=self.bins.__getitem__)

    @cached_property
    def groups(self) -> list[tuple[int, list[int]]]:
        """(bins, row numbers) of rows with equal bins, in the order of the message."""
        return [(b, [r for r in self.order if self.bins[r] == b]) for b in sorted(set(self.bins))]


@dataclass(frozen=True)
class Prelude:
    """Bins of the rows, and their distributions: one byte per symbol, ``[rows of a group, channels, symbols]`` per
    group."""

    rows: Rows
    tables: Sequence[UInt8]

    def to_bytes(self) -> bytes:
        return np.array(self.rows.bins, "<u2").tobytes() + b"".join(t.tobytes() for t in self.tables)

    @classmethod
    def parse(cls, data: bytes, header: Header) -> "Prelude":
        """``data``: as many bytes as the header says."""
        if zlib.crc32(data) != header.prelude_crc:
            raise WireDamageError("the CRC-32 of the distributions is wrong; send the message again")
        geometry = header.geometry
        bins = np.frombuffer(data, "<u2", 2 * geometry.layers).tolist()
        if any(b % 2 or not FEWEST <= b <= MOST for b in bins):
            raise WireDamageError(f"bins are {bins}, expected even numbers from {FEWEST} to {MOST}")
        rows = Rows(tuple(bins))
        if len(data) != 2 * len(bins) + geometry.channels * sum(b - 1 for b in bins):
            raise WireDamageError(f"the distributions' size does not fit the bins: {len(data)} bytes with bins {bins}")
        tables, at = [], 2 * len(bins)
        for b, members in rows.groups:
            shape = (len(members), geometry.channels, b - 1)
            tables.append(np.frombuffer(data, np.uint8, math.prod(shape), at).reshape(shape))
            at += math.prod(shape)
        return cls(rows, tables)

    def frequencies(self) -> list[UInt16]:
        """``[rows of a group, channels, symbols]`` per group."""
        out = []
        for table in self.tables:
            found = frequencies(table.reshape(-1, table.shape[-1]))
            if found is None:
                raise WireDamageError("a channel's distribution is empty, expected at least one symbol")
            out.append(found.reshape(table.shape))
        return out


@dataclass(frozen=True)
class Frame:
    """One chunk: peaks ``[rows, tokens]`` as bits, and per lane its words (how many, and which) and state."""

    peaks: Array
    lengths: UInt16
    states: UInt32
    words: UInt16

    def to_bytes(self, header: bytes, index: int) -> bytes:
        sections = (self.peaks, self.lengths.astype("<u2"), self.states.astype("<u4"), self.words.astype("<u2"))
        payload = b"".join(s.tobytes() for s in sections)
        return FRAME.pack(len(payload), _frame_crc(header, index, payload)) + payload

    @classmethod
    def parse(cls, data: bytes, header: bytes, index: int, geometry: Geometry) -> "Frame":
        """``data``: with its size, which lies within ``payload_bytes``, and CRC."""
        payload = data[FRAME.size :]
        if FRAME.unpack_from(data)[1] != _frame_crc(header, index, payload):
            raise WireDamageError(f"the CRC-32 of chunk {index} is wrong; send the message again")
        shape = (2 * geometry.layers, geometry.chunk_tokens(index))
        at = math.prod(shape) * geometry.dtype.itemsize
        peaks = np.frombuffer(payload, geometry.peaks_dtype, math.prod(shape)).reshape(shape)
        lengths = np.frombuffer(payload, "<u2", geometry.lanes, at)
        states = np.frombuffer(payload, "<u4", geometry.lanes, at + lengths.nbytes)
        at += lengths.nbytes + states.nbytes
        if len(payload) - at != 2 * int(lengths.sum(dtype=np.int64)):
            raise WireDamageError(f"chunk {index} has {len(payload) - at} bytes of words, not those its lanes count")
        return cls(peaks, lengths, states, np.frombuffer(payload, "<u2", offset=at))


def _frame_crc(header: bytes, index: int, payload: bytes) -> int:
    """Of a frame in its place: one of another message, or of another chunk, does not fit. Without the header's own
    CRC: any header followed by its CRC-32 has the same CRC-32."""
    return zlib.crc32(payload, zlib.crc32(header[:-4] + struct.pack("<QQ", index, len(payload))))
