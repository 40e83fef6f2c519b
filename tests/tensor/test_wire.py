"""The wire codec: what arrives is what quantisation leaves, bit by bit, and damage is an error, never other tokens."""

import math
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors import MethodError
from compressors.wire import Bins, Decoder, WireDamageError, WireError, WireFormatError, decode, encode, fake_quant
from compressors.wire.container import FRAME, HEADER_BYTES, Frame, Header, Prelude
from compressors.wire.lanes import AT_ONCE, batches
from compressors.wire.tables import TOTAL, frequencies, to_bytes

quick = settings(max_examples=60, deadline=None, derandomize=True)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LARGEST = {torch.bfloat16: 3.3e38, torch.float16: 65504.0, torch.float32: 3.4e38}


def kv(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Channels of different spread, as keys have them, and some values that are exactly zero."""
    rng = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[-1], generator=rng).exp()
    keys, values = (torch.randn(shape, generator=rng) * spread for _ in range(2))
    values[torch.rand(shape, generator=rng) < 0.1] = 0
    return keys.to(dtype), values.to(dtype)


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    bits = {2: torch.int16, 4: torch.int32}
    return all(
        a.dtype == b.dtype and torch.equal(a.view(bits[a.dtype.itemsize]), b.view(bits[b.dtype.itemsize]))
        for a, b in zip(one, other, strict=True)
    )


# -- round trips -------------------------------------------------------------------------------------------


@st.composite
def caches(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor], Bins, int]:
    shape = tuple(draw(st.integers(1, most)) for most in (3, 3, 40, 24))
    dtype = draw(st.sampled_from(DTYPES))
    keys, values = (x.float() for x in kv(shape, dtype, draw(st.integers(0, 99))))
    for tensor in (keys, values):  # whole vectors of one magnitude, up to the dtype's ends
        scale = draw(st.sampled_from([0.0, 1e-44, 1e-38, 1e-6, 1.0, LARGEST[dtype]]))
        token = draw(st.integers(0, shape[2] - 1))
        tensor[:, :, token] = tensor[:, :, token].sign() * scale
    bins = st.lists(st.integers(2, 128).map(lambda half: 2 * half), min_size=shape[0], max_size=shape[0]).map(tuple)
    return (keys.to(dtype), values.to(dtype)), Bins(draw(bins), draw(bins)), draw(st.integers(1, 48))


@quick
@given(caches())
def test_what_arrives_is_what_quantisation_leaves(case: tuple[tuple[Tensor, Tensor], Bins, int]) -> None:
    cache, bins, chunk = case
    assert same(decode(encode(*cache, bins, chunk)), fake_quant(*cache, bins))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600])
def test_defaults(tokens: int, dtype: torch.dtype) -> None:
    cache = kv((4, 2, tokens, 64), dtype)
    assert same(decode(encode(*cache)), fake_quant(*cache))


def test_more_lanes_than_are_coded_at_once() -> None:
    cache = kv((2, 1, 80, 32))
    message = encode(*cache, chunk=1)
    header = Header.parse(message[:HEADER_BYTES], 1 << 20)
    wide = replace(header.geometry, layers=AT_ONCE // 8)
    assert [len(run) for run in batches(wide, 3, 7)] == [2, 2]
    assert same(decode(message), fake_quant(*cache))


@quick
@given(st.data())
def test_pieces_give_the_same_tokens_as_they_arrive(data: st.DataObject) -> None:
    cache = kv((2, 2, 70, 16))
    message = encode(*cache, chunk=16)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(message)), max_size=12)))
    decoder, found = Decoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(message)], strict=True):
        found.append(decoder.feed(message[start:stop]))
    decoder.finish()
    arrived = [f for f in found if f is not None]
    keys, values = (torch.cat(parts, 2) for parts in zip(*arrived, strict=True))
    assert same((keys, values), fake_quant(*cache))


def test_a_chunk_is_usable_before_the_next_arrives() -> None:
    cache = kv((2, 1, 64, 16))
    message, decoder = encode(*cache, chunk=16), Decoder()
    first = HEADER_BYTES + Header.parse(message[:HEADER_BYTES], 1 << 20).prelude_bytes
    first += FRAME.size + FRAME.unpack_from(message, first)[0]
    found = decoder.feed(message[:first])
    assert found is not None
    assert same(found, tuple(x[:, :, :16] for x in fake_quant(*cache)))
    with pytest.raises(WireDamageError, match="after 1 of 4 chunks"):
        decoder.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_half_a_bin(dtype: torch.dtype) -> None:
    keys, values = kv((6, 2, 30, 32), dtype)
    bins = Bins.of(6)
    for x, lossy, of_layer in zip((keys, values), fake_quant(keys, values), (bins.keys, bins.values), strict=True):
        peak = x.float().abs().amax((1, 3), keepdim=True)
        half = 0.5 / (torch.tensor(of_layer) // 2 - 1).view(-1, 1, 1, 1)
        assert ((x.float() - lossy.float()).abs() <= peak * half * 1.01 + peak * torch.finfo(dtype).eps).all()


def test_deeper_layers_have_fewer_bins() -> None:
    assert Bins.of(30) == Bins((32,) * 10 + (16,) * 20, (32,) * 2 + (16,) * 28)
    assert Bins.of(1) == Bins((32,), (32,))


# -- size --------------------------------------------------------------------------------------------------


def test_the_coder_comes_close_to_the_entropy() -> None:
    cache = kv((4, 2, 2048, 64), seed=5)
    message = encode(*cache)
    bits = 0.0
    for x, of_layer in zip(cache, (Bins.of(4).keys, Bins.of(4).values), strict=True):
        for layer, b in zip(x.float(), of_layer, strict=True):
            symbols = (layer / layer.abs().amax((0, 2), keepdim=True) * (b // 2 - 1)).round().long() + b // 2 - 1
            share = torch.nn.functional.one_hot(symbols, b).double().mean(1)
            bits -= float((share * share.clamp(min=1e-12).log2()).sum()) * 2048
    peaks = 2 * 4 * 2048 * 16
    elements = cache[0].numel() * 2
    assert 8 * len(message) < peaks + bits * 1.005 + 0.12 * elements  # distributions, states and lengths


def test_constant_channels_cost_almost_nothing() -> None:
    keys = torch.ones(2, 2, 2048, 32)
    assert 8 * len(encode(keys, -keys)) / (2 * keys.numel()) < 0.65  # 0.5 are the peaks, the rest distributions


@quick
@given(st.integers(1, 5), st.integers(3, 255), st.integers(0, 2**32 - 1), st.floats(0, 6))
def test_frequencies(channels: int, symbols: int, seed: int, skew: float) -> None:
    """They add up, every symbol that occurs has one, and they cost little more than the counts themselves."""
    rng = np.random.default_rng(seed)
    counts = np.floor(rng.random((channels, symbols)) ** (1 + skew) * 5000).astype(np.int64)
    counts[:, seed % symbols] += 1
    freqs = frequencies(to_bytes(counts))
    assert freqs is not None
    assert (freqs.sum(1, dtype=int) == TOTAL).all()
    assert ((freqs > 0) == (counts > 0)).all()
    share = counts / counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.where(counts > 0, share * np.log2(share * TOTAL / freqs), 0).sum(1)
    assert (loss <= 0.01 + symbols / TOTAL).all()


# -- damage ------------------------------------------------------------------------------------------------

MESSAGE = encode(*kv((2, 2, 40, 8)), chunk=16)
ORIGINAL = decode(MESSAGE)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 8 * len(MESSAGE) - 1))
def test_any_flipped_bit_is_an_error(bit: int) -> None:
    damaged = bytearray(MESSAGE)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode(bytes(damaged))


@quick
@given(st.integers(0, len(MESSAGE) - 1), st.binary(min_size=1, max_size=40), st.sampled_from(["over", "into", "out"]))
def test_other_bytes_are_an_error(place: int, other: bytes, how: str) -> None:
    skip = {"over": len(other), "into": 0, "out": len(other)}[how]
    changed = MESSAGE[:place] + (b"" if how == "out" else other) + MESSAGE[place + skip :]
    if changed == MESSAGE:
        return
    with pytest.raises(WireError):
        decode(changed)


@quick
@given(st.integers(0, len(MESSAGE) - 1))
def test_a_message_that_is_cut_off_is_an_error(length: int) -> None:
    with pytest.raises(WireDamageError, match="the message ends after"):
        decode(MESSAGE[:length])


@quick
@given(st.binary(min_size=1, max_size=50))
def test_bytes_behind_the_end_are_an_error(more: bytes) -> None:
    with pytest.raises(WireDamageError, match=f"{len(more)} bytes follow the end"):
        decode(MESSAGE + more)
    decoder = Decoder()
    assert decoder.feed(MESSAGE) is not None
    for _ in range(2):
        with pytest.raises(WireDamageError, match="follow the end"):
            decoder.feed(more)


@quick
@given(st.binary(max_size=200))
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_wrong_magic_and_version_are_named() -> None:
    with pytest.raises(WireFormatError, match="not a KV message"):
        decode(b"PK" + MESSAGE[2:])
    with pytest.raises(WireFormatError, match="version 2, expected 1"):
        decode(MESSAGE[:4] + b"\x02\x00" + MESSAGE[6:])


def frames_of(message: bytes) -> tuple[Header, bytes, list[bytes]]:
    header = Header.parse(message[:HEADER_BYTES], 1 << 30)
    at = HEADER_BYTES + header.prelude_bytes
    start, frames = message[:at], []
    while at < len(message):
        size = FRAME.size + FRAME.unpack_from(message, at)[0]
        frames.append(message[at : at + size])
        at += size
    return header, start, frames


def test_frames_hold_in_their_place_only() -> None:
    """Of the same message in another order, and of another message with the same sizes everywhere."""
    keys = torch.ones(1, 1, 32, 8)
    one, other = (frames_of(encode(sign * keys, keys, chunk=16)) for sign in (1, -1))
    assert [len(f) for f in one[2]] == [len(f) for f in other[2]]
    for frames in ([one[2][1], one[2][0]], [one[2][0], other[2][1]]):
        with pytest.raises(WireDamageError, match="CRC-32 of chunk"):
            decode(one[1] + b"".join(frames))


def test_an_error_is_final() -> None:
    """Nothing is returned for what lies behind damage."""
    _, start, frames = frames_of(MESSAGE)
    decoder = Decoder()
    with pytest.raises(WireDamageError, match="CRC-32 of chunk 0"):
        decoder.feed(start + frames[0][:-1] + bytes([frames[0][-1] ^ 1]))
    with pytest.raises(WireDamageError, match="CRC-32 of chunk 0"):
        decoder.feed(frames[0])
    with pytest.raises(WireDamageError, match="CRC-32 of chunk 0"):
        decoder.finish()


# -- forgery: every CRC-32 is right ----------------------------------------------------------------------------


def forged(**changes: int) -> bytes:
    header, start, frames = frames_of(MESSAGE)
    geometry = {k: v for k, v in changes.items() if k != "prelude_bytes"}
    sizes = {k: v for k, v in changes.items() if k == "prelude_bytes"}
    header = replace(header, geometry=replace(header.geometry, **geometry), **sizes)
    return header.to_bytes() + start[HEADER_BYTES:] + b"".join(frames)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 2**63}, {"tokens": 0}, {"tokens": 39}, {"layers": 2**32 - 1}, {"heads": 2**32 - 1}, {"layers": 3},
        {"head_dim": 2**31, "heads": 2**31}, {"chunk": 0}, {"chunk": 4097}, {"chunk": 17}, {"head_dim": 16, "heads": 1},
        {"prelude_bytes": 2**63}, {"prelude_bytes": 0}, {"prelude_bytes": 900},
        {"tokens": 2**24, "chunk": 4096, "layers": 1}, {"tokens": 2**24},
    ],
)  # fmt: skip
def test_forged_sizes_are_an_error_and_allocate_nothing(changes: dict[str, int]) -> None:
    message = forged(**changes)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_the_receiver_does_not_allow_is_not_decoded() -> None:
    size = sum(x.nbytes for x in ORIGINAL)
    with pytest.raises(WireFormatError, match=f"takes {size} bytes, allowed are {size - 1}"):
        decode(MESSAGE, max_bytes=size - 1)
    assert same(decode(MESSAGE, max_bytes=size), ORIGINAL)


@quick
@given(st.data())
def test_forged_words_and_states_are_an_error(data: st.DataObject) -> None:
    header, start, frames = frames_of(MESSAGE)
    index = data.draw(st.integers(0, len(frames) - 1))
    frame = Frame.parse(frames[index], MESSAGE[:HEADER_BYTES], index, header.geometry)
    lane = data.draw(st.integers(0, len(frame.states) - 1))
    states, words, lengths = frame.states.copy(), frame.words.copy(), frame.lengths.copy()
    how = data.draw(st.sampled_from(["state", "word", "length"]))
    if how == "state":
        states[lane] = data.draw(st.integers(0, 2**32 - 1).filter(lambda x: x != states[lane]))
    elif how == "word":
        word = data.draw(st.integers(0, len(words) - 1))
        words[word] ^= data.draw(st.integers(1, 2**16 - 1))
    else:
        taker, giver = lane, (lane + 1) % len(lengths)
        assert lengths[giver]
        lengths[taker], lengths[giver] = lengths[taker] + 1, lengths[giver] - 1
    frames[index] = Frame(frame.peaks, lengths, states, words).to_bytes(MESSAGE[:HEADER_BYTES], index)
    with pytest.raises(WireDamageError, match="does not end as it began"):
        decode(start + b"".join(frames))


@pytest.mark.parametrize("peak", [-1.0, math.nan, math.inf])
def test_forged_peaks_are_an_error(peak: float) -> None:
    header, start, frames = frames_of(MESSAGE)
    frame = Frame.parse(frames[1], MESSAGE[:HEADER_BYTES], 1, header.geometry)
    peaks = frame.peaks.copy()
    peaks[2, 3] = torch.tensor(peak, dtype=torch.bfloat16).view(torch.int16).item()
    frames[1] = replace(frame, peaks=peaks).to_bytes(MESSAGE[:HEADER_BYTES], 1)
    with pytest.raises(WireDamageError, match="peak is negative or not finite"):
        decode(start + b"".join(frames))


@quick
@given(st.binary(max_size=60))
def test_forged_payloads_are_an_error(payload: bytes) -> None:
    _, start, frames = frames_of(MESSAGE)
    crc = zlib.crc32(payload, zlib.crc32(MESSAGE[: HEADER_BYTES - 4] + struct.pack("<QQ", 0, len(payload))))
    frames[0] = FRAME.pack(len(payload), crc) + payload
    with pytest.raises(WireDamageError):
        decode(start + b"".join(frames))


@quick
@given(st.data())
def test_forged_distributions_decode_to_nothing_else(data: st.DataObject) -> None:
    header, start, frames = frames_of(MESSAGE)
    packed = bytearray(start[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 5))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    head = replace(header, prelude_crc=zlib.crc32(packed)).to_bytes()
    parsed = [Frame.parse(f, MESSAGE[:HEADER_BYTES], i, header.geometry) for i, f in enumerate(frames)]
    message = head + bytes(packed) + b"".join(f.to_bytes(head, i) for i, f in enumerate(parsed))
    try:
        decoded = decode(message)
    except WireError:
        return
    assert same(decoded, ORIGINAL)  # the changed bytes round to the same frequencies


def test_an_empty_distribution_is_an_error() -> None:
    header, start, _ = frames_of(MESSAGE)
    packed = start[HEADER_BYTES:]
    prelude = Prelude.parse(packed, header)
    empty = replace(prelude, tables=[np.zeros_like(t) for t in prelude.tables]).to_bytes()
    with pytest.raises(WireDamageError, match="distribution is empty"):
        decode(replace(header, prelude_crc=zlib.crc32(empty)).to_bytes() + empty)


# -- what cannot be encoded --------------------------------------------------------------------------------


ZEROS = torch.zeros(2, 1, 9, 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    keys, values = kv((2, 1, 9, 8))
    values[1, 0, 7, 3] = bad
    for function in (encode, fake_quant):
        with pytest.raises(MethodError, match="KV of token 7 is not finite"):
            function(keys, values)


@pytest.mark.parametrize(
    ("keys", "values", "arguments", "why"),
    [
        (ZEROS, torch.zeros(2, 1, 8, 8), {}, "expected both"),
        (torch.zeros(2, 1, 0, 8), torch.zeros(2, 1, 0, 8), {}, "at least one"),
        (torch.zeros(2, 9, 8), torch.zeros(2, 9, 8), {}, "expected both"),
        (ZEROS.to(torch.int8), ZEROS.to(torch.int8), {}, "torch.int8"),
        (ZEROS, ZEROS.half(), {}, "torch.float16"),
        (ZEROS, ZEROS, {"chunk": 0}, "1 to 4096"),
        (ZEROS, ZEROS, {"bins": Bins((16,), (16, 16))}, "expected 2"),
        (ZEROS, ZEROS, {"bins": Bins((16, 2), (16, 16))}, "2 bins for keys of layer 1"),
        (ZEROS, ZEROS, {"bins": Bins((16, 16), (17, 16))}, "17 bins for values"),
        (ZEROS, ZEROS, {"bins": Bins((16, 16), (258, 16))}, "even number from 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(keys: Tensor, values: Tensor, arguments: dict, why: str) -> None:
    with pytest.raises(MethodError, match=why):
        encode(keys, values, **arguments)
