"""A range coder over many independent streams at once: rANS (Duda 2013, arXiv 1311.2540) in numpy.

One stream is a *lane*: a 32-bit state and 16-bit words. All lanes take the same step at the same time, so that a step
is a dozen vector operations whatever their number. A lane's symbols come in ``block`` runs of ``tokens``, one run per
channel, each run with the channel's distribution.

A state lies in [2^16, 2^32) and frequencies add up to 2^12, so at most one word moves per symbol: before a symbol of
frequency f is put on a state x with x >= f 2^20, the low word of x goes out; a state that falls below 2^16 takes the
next word in. The first state is 2^16: a decoder that ends elsewhere, or with words left, has read something else.
"""

import numpy as np
import numpy.typing as npt

from compressors.wire.tables import PRECISION, TOTAL, UInt8, UInt16

LOW = 1 << 16
UInt32 = npt.NDArray[np.uint32]


def encode(symbols: UInt8, freqs: UInt16) -> tuple[UInt32, UInt16, UInt16]:
    """Code all lanes.

    Args:
        symbols: ``[block, tokens, lanes]``.
        freqs: ``[block, symbols, lanes]``, adding up to ``TOTAL`` over the symbols; not 0 for those that occur.

    Returns:
        Final states uint32 ``[lanes]``, words per lane uint16 ``[lanes]``, and all words uint16, lane after lane, in
        the order in which a decoder needs them.
    """
    block, tokens, lanes = symbols.shape
    lane = np.arange(lanes)
    state = np.full(lanes, LOW, np.uint32)
    moved: list[tuple[npt.NDArray[np.intp], UInt16]] = []
    for channel in reversed(range(block)):
        freq, start = _flat(freqs[channel])
        for token in reversed(range(tokens)):
            index = symbols[channel, token] * np.intp(lanes) + lane
            f = freq.take(index)
            full = np.flatnonzero((state >> (32 - PRECISION)) >= f)
            if len(full):
                moved.append((full, state[full].astype(np.uint16)))
                state[full] >>= 16
            quotient = state // f
            state = (quotient << PRECISION) + (state - quotient * f) + start.take(index)
    moved.reverse()
    owners = np.concatenate([lane[:0], *(owner for owner, _ in moved)])
    words = np.concatenate([np.empty(0, np.uint16), *(word for _, word in moved)])
    lengths = np.bincount(owners, minlength=lanes).astype(np.uint16)
    return state, lengths, words[np.argsort(owners.astype(np.uint32), kind="stable")]


def decode(states: UInt32, lengths: UInt16, words: UInt16, freqs: UInt16, tokens: int) -> UInt8 | None:
    """The symbols ``[block, tokens, lanes]`` of ``encode``, or None when a lane does not end where it began. Any input
    of consistent sizes is safe."""
    block, symbols, lanes = freqs.shape
    lane = np.arange(lanes)
    ends = np.cumsum(lengths, dtype=np.int64)
    at = ends - lengths
    words = np.append(words, np.uint16(0))  # something to read for a lane that runs over its end
    state = states.copy()
    out = np.empty((block, tokens, lanes), np.uint8)
    edges = np.cumsum(freqs, axis=1, dtype=np.uint16)[:, : symbols - 1]  # where each symbol but the last one ends
    for channel in range(block):
        freq, start = _flat(freqs[channel])
        for token in range(tokens):
            slot = state & np.uint32(TOTAL - 1)
            passed = edges[channel] <= slot.astype(np.uint16)
            symbol = np.add.reduce(passed.view(np.uint8), axis=0, dtype=np.uint8, out=out[channel, token])
            index = symbol * np.intp(lanes) + lane
            state = freq.take(index) * (state >> PRECISION) + slot - start.take(index)
            empty = np.flatnonzero(state < LOW)
            if len(empty):
                place = at[empty]
                state[empty] = state[empty] << 16 | words.take(place, mode="clip")
                at[empty] = place + 1
    return out if (state == LOW).all() and (at == ends).all() else None


def _flat(freqs: UInt16) -> tuple[UInt32, UInt32]:
    """Frequencies and starts of one channel's distributions ``[symbols, lanes]``, each flat, symbol after symbol."""
    freq = freqs.astype(np.uint32)
    return freq.ravel(), (np.cumsum(freq, axis=0, dtype=np.uint32) - freq).ravel()
