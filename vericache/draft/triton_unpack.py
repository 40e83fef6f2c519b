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


def _apart(bits: int, part: int) -> str:
    """PTX: four bytes, and of three bits four more with the third bits -> four bfloat16 numbers, 128 + code. Bytes 0
    and 2 of a word lie as the numbers of a pair must, so these come first."""
    low = 4 if bits == 4 else 2
    mask = (2**low - 1) * 0x10001
    lines = [".reg .b32 x, t;"]
    for out in (0, 1):
        lines += [f"shr.b32 x, $2, {part * low + 8 * out};", f"lop3.b32 x, x, {mask}, 0x43004300, 0xEA;"]
        if bits == 3:
            shift = part - 2 + 8 * out
            lines.append(f"shr.b32 t, $3, {shift};" if shift >= 0 else f"shl.b32 t, $3, {-shift};")
            lines.append("lop3.b32 x, t, 0x40004, x, 0xEA;")
        lines.append(f"mov.b32 ${out}, x;")
    return "{" + " ".join(lines) + "}"


APART_4 = tl.constexpr([_apart(4, part) for part in range(2)])
APART_3, APART_2 = (tl.constexpr([_apart(bits, part) for part in range(4)]) for bits in (3, 2))


@triton.jit
def softmax_step(peak, mass, acc, logits, valid):  # type: ignore[no-untyped-def]
    """Weights of a tile, relative to the new maximum, to which ``mass`` and ``acc`` are brought."""
    logits = tl.where(valid[None, :], logits, float("-inf"))
    top = tl.maximum(peak, tl.max(logits, 1))
    fade, weights = tl.exp2(peak - top), tl.exp2(logits - top[:, None])
    return top, mass * fade + tl.sum(weights, 1), acc * fade[:, None], weights


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
        peak, mass, acc, weights = softmax_step(peak, mass, acc, logits, valid)
        values = tl.load(at + p_kv, mask=valid[:, None], other=0.0)
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, mass, acc


@triton.jit
def turbo_tiles(  # type: ignore[no-untyped-def]
    turned, content, pages, first, last, kept_pages, kept, scale_log2, page_bytes, step,
    bits: tl.constexpr, page_size: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """TurboQuant pages ``first .. last - 1`` of a head whose queries, ``[G, D]`` at ``turned``, are in the space of the
    codes, as the outputs will be; pages behind the first ``kept_pages``, which hold ``kept`` tokens, are full.

    Codes are the *left* operand of both products: a tensor core takes 16 of its rows at once and only 8 of queries,
    and what a program holds shrinks to logits and outputs of its few queries. So logits are ``[tokens, G]`` and
    outputs ``[D, G]``. A byte of keys holds neighbouring parts of a head, a byte of values neighbouring parts of the
    page: logits are made part of the page by part of the page.
    """
    dtype: tl.constexpr = turned.dtype.element_ty
    parts: tl.constexpr = 2 if bits == 4 else 4
    width: tl.constexpr = dim // parts
    some: tl.constexpr = page_size // parts
    offset: tl.constexpr = 128 if dtype == tl.bfloat16 else 0
    middle: tl.constexpr = (2**bits - 1) / 2 + offset
    g, d, w, t = tl.arange(0, group_pad), tl.arange(0, dim), tl.arange(0, width), tl.arange(0, some)
    mine = _placed(t, dtype)
    queries = ()
    total = tl.zeros([group_pad], tl.float32)
    for part in tl.static_range(parts):
        at = turned + g[None, :] * dim + (part * width + _placed(w, dtype))[:, None]
        queries = _with(queries, tl.load(at, mask=(g < group)[None, :], other=0.0))
        total += tl.sum(queries[part].to(tl.float32), 0)
    peak = tl.full([group_pad], float("-inf"), tl.float32)
    mass = tl.zeros([some, group_pad], tl.float32)
    loss = tl.zeros([some, group_pad], tl.float32)  # weights, times the middle of the codes
    acc = tl.zeros([dim, group_pad], tl.float32)
    for at in range(first, last):
        page = content + tl.load(pages + at).to(tl.int64) * page_bytes
        left = tl.where(at < kept_pages, kept - at * page_size, page_size)
        ranges = (page + page_size * dim * bits // 4).to(tl.pointer_type(tl.uint32))
        values, third_values = _rows(page + page_size * dim * bits // 8, d, t, dim, some, bits)
        logits, scales, top = (), (), peak
        for part in tl.static_range(parts):
            token = part * some + mine
            keys, third_keys = _rows(page, token, w, page_size, width, bits)
            product = tl.zeros([some, group_pad], tl.float32)
            for i in tl.static_range(parts):
                product += tl.dot(_part(keys, third_keys, i, bits, dtype), queries[i], input_precision="ieee")
            scale = tl.load(ranges + token)
            product = (product - (total * middle)[None, :]) * (_half(scale) * (step * scale_log2))[:, None]
            logits = _with(logits, tl.where((token < left)[:, None], product, float("-inf")))
            value_scale = tl.where(token < left, _half(scale >> 16) * step, 0.0)  # of no token it may be anything
            scales = _with(scales, value_scale)
            top = tl.maximum(top, tl.max(logits[part], 0))
        fade = tl.exp2(peak - top)
        peak, mass, loss, acc = top, mass * fade[None, :], loss * fade[None, :], acc * fade[None, :]
        for part in tl.static_range(parts):
            weights = tl.exp2(logits[part] - top[None, :])
            mass += weights
            weights = (weights * scales[part][:, None]).to(dtype)
            loss += weights.to(tl.float32)
            acc += tl.dot(_part(values, third_values, part, bits, dtype), weights, input_precision="ieee")
    acc -= (tl.sum(loss, 0) * middle)[None, :]
    return peak, tl.sum(mass, 0), tl.trans(acc)


@triton.jit
def _with(some, more):  # type: ignore[no-untyped-def]
    return some + (more,)  # noqa: RUF005 Triton knows no star


@triton.jit
def _placed(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where number x of a row of codes lies: ``_apart`` gives byte 2 of four before byte 1."""
    if dtype == tl.bfloat16:
        x = x & ~3 | (x & 1) << 1 | (x & 2) >> 1
    return x


@triton.jit
def _half(x):  # type: ignore[no-untyped-def]
    """float16 in the lower half of a word, as float32."""
    return (x & 65535).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rows(codes, row, column, rows: tl.constexpr, width: tl.constexpr, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some of the ``rows`` packed rows of ``width`` bytes at ``codes``, and their third bits, in the low half of a
    byte."""
    raw = tl.load(codes + row[:, None] * width + column[None, :])
    third = raw
    if bits == 3:
        at = codes + rows * width + (row % (rows // 2))[:, None] * width + column[None, :]
        third = tl.load(at) >> (row // (rows // 2) * 4).to(tl.uint8)[:, None]
    return raw, third


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
def _dot_t(q, keys):  # type: ignore[no-untyped-def]
    return tl.dot(q, tl.trans(keys), input_precision="ieee")


@triton.jit
def _part(raw, third, part: tl.constexpr, bits: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of part number ``part`` in ``dtype``; 128 + code in bfloat16."""
    if dtype != tl.bfloat16:
        low: tl.constexpr = 4 if bits == 4 else 2
        codes = (raw >> part * low) & (2**low - 1)
        if bits == 3:
            codes |= ((third >> part) & 1) << 2
        numbers = codes.to(tl.float32).to(dtype)
    elif bits == 3:
        three: tl.constexpr = APART_3[part]
        numbers = tl.inline_asm_elementwise(three, "=&r,=&r,r,r", [raw, third], tl.bfloat16, is_pure=True, pack=4)
    else:
        text: tl.constexpr = APART_4[part] if bits == 4 else APART_2[part]
        numbers = tl.inline_asm_elementwise(text, "=&r,=&r,r", [raw], tl.bfloat16, is_pure=True, pack=4)
    return numbers


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
        peak, mass, acc, weights = softmax_step(peak, mass, acc, logits, valid)
        group = 2 * groups + inside[:, None] * (dim // 32) + d[None, :] // 32
        codes = (tl.load(rows + code_bytes) >> shift) & (2**bits - 1)
        values = codes.to(tl.float32) * tl.load(ranges + group) + tl.load(ranges + groups + group)
        values = tl.where(valid[:, None], values, 0.0).to(q.dtype)
        acc += tl.dot(weights.to(q.dtype), values, input_precision="ieee")
    return peak, mass, acc
