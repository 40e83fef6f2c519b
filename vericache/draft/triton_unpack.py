"""Attention over tiles of head pages, in the model's dtype or packed, as parts of one Triton kernel.

Packed codes are numbers below 2^b, which the dot products take nearly as they are; what turns them into keys and
values is applied to logits and weights. A token's row of codes holds dimension d in byte d mod W at bit b (d div W),
W = D b / 8 (see ``vericache.draft.formats.pack``): one shift of a row of bytes gives one *part* of the head, W
neighbouring dimensions.

Conversions from integers would take most of the time. A code c is put into the last bits of the bfloat16 number 128
instead, which makes it 128 + c (its unit in the last place is 1), two codes per instruction; the 128 is taken back with
the middle of the codes.
"""

import triton
import triton.language as tl


def _spread(shift: int, mask: int) -> str:
    """PTX: four bytes -> four bfloat16 numbers, 128 and the ``mask`` bits of each from ``shift`` on."""
    move = f"shr.b32 w, $2, {shift};" if shift else "mov.b32 w, $2;"
    both = 0x43004300 | mask << 16 | mask
    return f"""{{ .reg .b32 w, a, b; {move}
        prmt.b32 a, w, 0x43434343, 0x4140; prmt.b32 b, w, 0x43434343, 0x4342;
        and.b32 $0, a, {both}; and.b32 $1, b, {both}; }}"""


NIBBLE_0, NIBBLE_1 = (tl.constexpr(_spread(s, 15)) for s in (0, 4))
PAIR_0, PAIR_1, PAIR_2, PAIR_3 = (tl.constexpr(_spread(s, 3)) for s in (0, 2, 4, 6))


@triton.jit
def softmax_step(peak, mass, acc, logits, valid):  # type: ignore[no-untyped-def]
    """Weights of a tile, relative to the new maximum, to which ``mass`` and ``acc`` are brought."""
    logits = tl.where(valid[None, :], logits, float("-inf"))
    top = tl.maximum(peak, tl.max(logits, 1))
    fade, weights = tl.exp2(peak - top), tl.exp2(logits - top[:, None])
    return top, mass * fade + tl.sum(weights, 1), acc * fade[:, None], weights, fade


@triton.jit
def plain_tiles(  # type: ignore[no-untyped-def]
    q, peak, mass, acc, pool, pages, first, last, kept_pages, kept, tail, scale_log2, p_page, p_kv, p_token,
    page_size: tl.constexpr, tile: tl.constexpr, stages: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Uncompressed pages ``first .. last - 1`` of a head, the first ``kept_pages`` of which hold ``kept`` tokens and
    the others ``tail``; those that come before ``first`` may be packed, and count as kept without tokens."""
    token, d = tl.arange(0, tile), tl.arange(0, dim)
    for base in tl.range(first, last, tile // page_size, num_stages=stages):
        if tile == page_size:
            index = base
            page = tl.load(pages + index).to(tl.int64)
            inside, exists = token, token >= 0
        else:  # several small pages at once
            index = base + token // page_size
            exists = index < last
            page = tl.load(pages + index, mask=exists, other=0).to(tl.int64)
            inside = token % page_size
        left = tl.where(index < kept_pages, kept - index * page_size, tail - (index - kept_pages) * page_size)
        valid = (inside < left) & exists
        at = pool + (page * p_page + inside * p_token)[:, None] + d[None, :]
        keys = tl.load(at, mask=valid[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
        peak, mass, acc, weights, _ = softmax_step(peak, mass, acc, logits, valid)
        values = tl.load(at + p_kv, mask=valid[:, None], other=0.0)
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, mass, acc


@triton.jit
def turbo_tiles(  # type: ignore[no-untyped-def]
    q, peak, mass, acc, content, pages, first, last, kept_pages, kept, scale_log2, turn, back, page_bytes, step,
    bits: tl.constexpr, page_size: tl.constexpr, tile: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """TurboQuant pages ``first .. last - 1``; those behind the first ``kept_pages``, which hold ``kept`` tokens, are
    full. Queries are turned once and outputs turned back once, part by part."""
    d = tl.arange(0, dim)
    four: tl.constexpr = bits == 4  # two parts, otherwise four
    low: tl.constexpr = 4 if four else 2
    width: tl.constexpr = dim * low // 8
    w = tl.arange(0, width)
    code_bytes: tl.constexpr = page_size * dim * bits // 8
    offset: tl.constexpr = 128 if q.dtype == tl.bfloat16 else 0
    middle: tl.constexpr = (2**bits - 1) / 2 + offset
    per_page: tl.constexpr = page_size // tile
    square = d[:, None] * dim + w[None, :]
    q0, q1 = _turned(q, turn + square, dim).to(q.dtype), _turned(q, turn + square + width, dim).to(q.dtype)
    total = tl.sum(q0.to(tl.float32), 1) + tl.sum(q1.to(tl.float32), 1)
    a0 = tl.zeros([acc.shape[0], width], tl.float32)
    a1 = tl.zeros([acc.shape[0], width], tl.float32)
    if not four:
        q2 = _turned(q, turn + square + 2 * width, dim).to(q.dtype)
        q3 = _turned(q, turn + square + 3 * width, dim).to(q.dtype)
        total += tl.sum(q2.to(tl.float32), 1) + tl.sum(q3.to(tl.float32), 1)
        a2 = tl.zeros([acc.shape[0], width], tl.float32)
        a3 = tl.zeros([acc.shape[0], width], tl.float32)
    loss = tl.zeros_like(mass)  # weights, times the middle of the codes
    for at in range(first * per_page, last * per_page):
        page, inside, valid = _packed_tile(content, pages, at, kept_pages, kept, page_bytes, page_size, tile)
        rows = page + inside[:, None] * width + w[None, :]
        third = page + page_size * width + (inside % (page_size // 2))[:, None] * width + w[None, :]  # of three bits
        nibble = (inside // (page_size // 2) * 4).to(tl.uint8)[:, None]
        ranges = (page + 2 * code_bytes).to(tl.pointer_type(tl.float16))
        raw = tl.load(rows)
        more = raw
        if bits == 3:
            more = tl.load(third) >> nibble
        logits = _dot_t(q0, _part(raw, more, 0, bits, q.dtype)) + _dot_t(q1, _part(raw, more, 1, bits, q.dtype))
        if not four:
            logits += _dot_t(q2, _part(raw, more, 2, bits, q.dtype)) + _dot_t(q3, _part(raw, more, 3, bits, q.dtype))
        key_scale = tl.load(ranges + inside).to(tl.float32) * (step * scale_log2)
        logits = (logits - (total * middle)[:, None]) * key_scale[None, :]
        peak, mass, _, weights, fade = softmax_step(peak, mass, acc, logits, valid)
        weights = weights * (tl.load(ranges + page_size + inside).to(tl.float32) * step)[None, :]
        weights = tl.where(valid[None, :], weights, 0.0).to(q.dtype)  # the scale of no token may be anything
        loss = loss * fade + tl.sum(weights.to(tl.float32), 1)
        raw = tl.load(rows + code_bytes)
        more = raw
        if bits == 3:
            more = tl.load(third + code_bytes) >> nibble
        a0 = _mixed(a0, fade, weights, _part(raw, more, 0, bits, q.dtype))
        a1 = _mixed(a1, fade, weights, _part(raw, more, 1, bits, q.dtype))
        if not four:
            a2 = _mixed(a2, fade, weights, _part(raw, more, 2, bits, q.dtype))
            a3 = _mixed(a3, fade, weights, _part(raw, more, 3, bits, q.dtype))
    square = w[:, None] * dim + d[None, :]
    lost = (loss * middle)[:, None]
    acc = _turned((a0 - lost).to(q.dtype), back + square, dim)
    acc += _turned((a1 - lost).to(q.dtype), back + square + width * dim, dim)
    if not four:
        acc += _turned((a2 - lost).to(q.dtype), back + square + 2 * width * dim, dim)
        acc += _turned((a3 - lost).to(q.dtype), back + square + 3 * width * dim, dim)
    return peak, mass, acc


@triton.jit
def _packed_tile(  # type: ignore[no-untyped-def]
    content, pages, at, kept_pages, kept, page_bytes, page_size: tl.constexpr, tile: tl.constexpr
):
    """Tile number ``at`` of a head's packed pages: where its page begins, its tokens there, and which of them exist."""
    per_page: tl.constexpr = page_size // tile
    index = at // per_page
    inside = at % per_page * tile + tl.arange(0, tile)
    left = tl.where(index < kept_pages, kept - index * page_size, page_size)
    return content + tl.load(pages + index).to(tl.int64) * page_bytes, inside, inside < left


@triton.jit
def _turned(x, matrix, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x`` times a matrix of signs over sqrt(D)."""
    return tl.dot(x, tl.load(matrix), input_precision="ieee") / dim**0.5


@triton.jit
def _dot_t(q, keys):  # type: ignore[no-untyped-def]
    return tl.dot(q, tl.trans(keys), input_precision="ieee")


@triton.jit
def _mixed(acc, fade, weights, values):  # type: ignore[no-untyped-def]
    return acc * fade[:, None] + tl.dot(weights, values, input_precision="ieee")


@triton.jit
def _part(raw, third, part: tl.constexpr, bits: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of part number ``part`` in ``dtype``; 128 + code in bfloat16."""
    if bits == 3 or dtype != tl.bfloat16:
        low: tl.constexpr = 4 if bits == 4 else 2
        offset: tl.constexpr = 128 if dtype == tl.bfloat16 else 0
        codes = (raw >> part * low) & (2**low - 1)
        if bits == 3:
            codes |= ((third >> part) & 1) << 2
        numbers = (codes.to(tl.float32) + offset).to(dtype)
    elif bits == 4:
        numbers = _asm(NIBBLE_0, raw) if part == 0 else _asm(NIBBLE_1, raw)
    elif part < 2:
        numbers = _asm(PAIR_0, raw) if part == 0 else _asm(PAIR_1, raw)
    else:
        numbers = _asm(PAIR_2, raw) if part == 2 else _asm(PAIR_3, raw)
    return numbers


@triton.jit
def _asm(text: tl.constexpr, raw):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(text, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def kivi_tiles(  # type: ignore[no-untyped-def]
    q, peak, mass, acc, content, pages, first, last, kept_pages, kept, scale_log2, page_bytes,
    bits: tl.constexpr, page_size: tl.constexpr, tile: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """The same over KIVI pages: keys and values are rebuilt element by element."""
    d = tl.arange(0, dim)
    width: tl.constexpr = dim * bits // 8
    code_bytes: tl.constexpr = page_size * width
    groups: tl.constexpr = page_size * dim // 32
    per_page: tl.constexpr = page_size // tile
    shift = (d // width * bits).to(tl.uint8)[None, :]
    for at in range(first * per_page, last * per_page):
        page, inside, valid = _packed_tile(content, pages, at, kept_pages, kept, page_bytes, page_size, tile)
        rows = page + inside[:, None] * width + (d % width)[None, :]
        ranges = (page + 2 * code_bytes).to(tl.pointer_type(tl.float16))
        group = (inside // 32)[:, None] * dim + d[None, :]
        codes = (tl.load(rows) >> shift) & (2**bits - 1)
        keys = codes.to(tl.float32) * tl.load(ranges + group) + tl.load(ranges + groups + group)
        logits = _dot_t(q, keys.to(q.dtype)) * scale_log2
        peak, mass, acc, weights, _ = softmax_step(peak, mass, acc, logits, valid)
        group = 2 * groups + inside[:, None] * (dim // 32) + d[None, :] // 32
        codes = (tl.load(rows + code_bytes) >> shift) & (2**bits - 1)
        values = codes.to(tl.float32) * tl.load(ranges + group) + tl.load(ranges + groups + group)
        values = tl.where(valid[:, None], values, 0.0).to(q.dtype)
        acc += tl.dot(weights.to(q.dtype), values, input_precision="ieee")
    return peak, mass, acc
