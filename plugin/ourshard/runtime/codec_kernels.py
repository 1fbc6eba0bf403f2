"""Triton kernels of the block codecs: one pass over memory each.

A program works on GROUP blocks of BLOCK elements of one part. Every operation is an integer one, or a float32 one whose
result IEEE 754 fixes; launched without fused multiply-add, they give the bits of `codec_torch.py`. Formats and reasons:
the notes in `codec.py`.
"""

# A kernel's arguments are annotated where Triton reads the annotation, and only there.
# mypy: ignore-errors
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from ourshard.runtime.codec import NOISE_BITS, SCALE_SLACK, SMALLEST_SCALE
from ourshard.runtime.codec_torch import PLACE_FACTOR


def _bytes_in_floats(keep: int, turn: int) -> str:
    """Return PTX that makes four float32s of four bytes b of one register: 2^23 + (b & keep ^ turn) each.

    That takes an instruction for the four and one for each, where compilers take two or three for each.
    """
    lines = [f"and.b32 t, $4, {keep * 0x01010101:#x};"] * (keep != 0xFF)
    lines += [f"xor.b32 t, {'$4' if keep == 0xFF else 't'}, {turn * 0x01010101:#x};"]
    lines += [f"prmt.b32 ${place}, t, 0x4B000000, {0x7650 + place:#x};" for place in range(4)]
    return "{ .reg .b32 t; " + " ".join(lines) + " }"


INT8 = tl.constexpr(0)
INT4 = tl.constexpr(1)
FP8 = tl.constexpr(2)
_NOISE_BITS = tl.constexpr(NOISE_BITS)
_NOISE_MASK = tl.constexpr((1 << NOISE_BITS) - 1)
# 1.5 * 2^(23 - NOISE_BITS): adding it to a small float32 rounds that to a multiple of 2^-NOISE_BITS. Its own bits have
# no share in the low ones of a code.
_FIXER = tl.constexpr(1.5 * 2.0 ** (23 - NOISE_BITS))
_FIXER_BITS = tl.constexpr((150 - NOISE_BITS) << 23 | 1 << 22)
_SCALE_SLACK = tl.constexpr(SCALE_SLACK)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_PLACE_FACTOR = tl.constexpr(PLACE_FACTOR)
# 1.5 * 2^23: adding it to a small float32 rounds that to an integer, ties to even, in the low bits.
_ROUNDER = tl.constexpr(12582912.0)
# A byte b in the low bits of 2^23 is the float32 2^23 + b. These turn the sign of a code too, which becomes an offset.
_BYTE_BITS = tl.constexpr(0x4B000080)
_BYTE_ZERO = tl.constexpr(8388608.0 + 128.0)
_NIBBLE_BITS = tl.constexpr(0x4B000008)
_NIBBLE_ZERO = tl.constexpr(8388608.0 + 8.0)
_BYTES = tl.constexpr(_bytes_in_floats(0xFF, 0x80))
_LOW_NIBBLES = tl.constexpr(_bytes_in_floats(0x0F, 0x08))
_HIGH_NIBBLES = tl.constexpr(_bytes_in_floats(0xF0, 0x80))
# By way of float16, which holds every value of float8_e4m3fn.
_FP8_VALUES = tl.constexpr("""{
    .reg .b16 codes<2>, halves<4>; .reg .b32 pairs<2>;
    mov.b32 {codes0, codes1}, $4;
    cvt.rn.f16x2.e4m3x2 pairs0, codes0; cvt.rn.f16x2.e4m3x2 pairs1, codes1;
    mov.b32 {halves0, halves1}, pairs0; mov.b32 {halves2, halves3}, pairs1;
    cvt.f32.f16 $0, halves0; cvt.f32.f16 $1, halves1; cvt.f32.f16 $2, halves2; cvt.f32.f16 $3, halves3;
}""")
_FP8_BITS = tl.constexpr(0x87F00000 - (1 << 32))  # sign, exponent and fraction of a float8_e4m3fn in a float32
_FP8_FACTOR = tl.constexpr(2.0**120)  # 2^(127 - 7): the exponents' biases


@triton.jit(do_not_specialize=["seed"])
def encode(
    src,
    out,
    blocks,
    part_nbytes,
    code_nbytes,
    seed,
    STOCHASTIC: tl.constexpr,
    LIMIT: tl.constexpr,
    INVERSE_LIMIT: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    KIND: tl.constexpr,
    FP8_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK // 2
    part = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    row_mask = rows < blocks
    mask = row_mask[:, None]
    columns = tl.arange(0, HALF)
    body = tl.multiple_of(out + part * part_nbytes, ALIGN)
    first = part * blocks * BLOCK
    places = rows.to(tl.int64)[:, None] * BLOCK + columns[None, :]
    low = tl.load(src + first + places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(src + first + places + HALF, mask=mask, other=0.0).to(tl.float32)
    peaks = tl.reduce(_larger(tl.abs(low), tl.abs(high)), 1, _larger)
    scales, inverses, finite = _scales(peaks, INVERSE_LIMIT, LARGEST_SCALE)
    low, high = low * inverses[:, None], high * inverses[:, None]
    # Without stochastic rounding the noise is not used, and no code is made for it.
    low_noise, high_noise = _noise(first.to(tl.uint32) + rows.to(tl.uint32) * BLOCK, columns, seed)
    low_codes = _codes(low, finite[:, None], low_noise, LIMIT, STOCHASTIC, KIND, FP8_CAST)
    high_codes = _codes(high, finite[:, None], high_noise, LIMIT, STOCHASTIC, KIND, FP8_CAST)
    if KIND == INT4:
        offsets = rows.to(tl.int64)[:, None] * HALF + columns[None, :]
        codes = (low_codes & 0xF) | ((high_codes & 0xF) << 4)
        tl.store(body + offsets, codes.to(tl.uint8), mask=mask)
    else:
        tl.store(body + places, low_codes.to(tl.uint8), mask=mask)
        tl.store(body + places + HALF, high_codes.to(tl.uint8), mask=mask)
    tl.store((body + code_nbytes).to(tl.pointer_type(tl.float32)) + rows, scales, mask=row_mask)


@triton.jit
def decode(
    out,
    message,
    blocks,
    part_nbytes,
    code_nbytes,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    PTX: tl.constexpr,
):
    part = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    body = tl.multiple_of(message + part * part_nbytes, ALIGN)
    target = out + part * blocks * BLOCK
    scales = _load_scales(body + code_nbytes, rows, blocks)
    mask, offsets, codes = _load_codes(body, rows, blocks, KIND, BLOCK)
    if KIND == INT4:
        places = rows.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(target + places, _low(codes, PTX) * scales, mask=mask)
        tl.store(target + places + BLOCK // 2, _high(codes, PTX) * (scales * 0.0625), mask=mask)
    else:
        tl.store(target + offsets, _byte_values(codes, KIND, PTX) * scales, mask=mask)


@triton.jit
def decode_sum(
    out,
    message,
    blocks,
    part_nbytes,
    code_nbytes,
    factor,
    parts,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    PTX: tl.constexpr,
    TOGETHER: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Sum `parts` messages, a multiple of TOGETHER: of so many parts the loads are under way at once.

    EXACT: `factor` is a power of two. A code has 8 bits and a scale 16, so that products are exact then, and one
    instruction that multiplies and adds gives the same bits.
    """
    WIDTH: tl.constexpr = BLOCK // 2 if KIND == INT4 else BLOCK
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    columns = tl.arange(0, WIDTH)
    mask = (rows < blocks)[:, None]
    places = rows.to(tl.int64)[:, None] * BLOCK + columns[None, :]
    sums = tl.zeros((GROUP, WIDTH), tl.float32)
    high_sums = tl.zeros((GROUP, WIDTH), tl.float32)
    body = message
    for _ in range(parts // TOGETHER):
        for _ in tl.static_range(TOGETHER):
            body = tl.multiple_of(body, ALIGN)
            scales = _load_scales(body + code_nbytes, rows, blocks) * factor
            _, _, codes = _load_codes(body, rows, blocks, KIND, BLOCK)
            if KIND == INT4:
                sums = _added(_low(codes, PTX), scales, sums, EXACT)
                high_sums = _added(_high(codes, PTX), scales * 0.0625, high_sums, EXACT)
            else:
                sums = _added(_byte_values(codes, KIND, PTX), scales, sums, EXACT)
            body += part_nbytes
    tl.store(out + places, sums, mask=mask)
    if KIND == INT4:
        tl.store(out + places + BLOCK // 2, high_sums, mask=mask)


@triton.jit
def _added(values, scales, sums, EXACT: tl.constexpr):
    return tl.fma(values, scales, sums) if EXACT else sums + values * scales


@triton.jit
def _load_scales(pointer, rows, blocks):
    """Load the scales of `rows` as a column."""
    return tl.load(pointer.to(tl.pointer_type(tl.float32)) + rows, mask=rows < blocks, other=0.0)[:, None]


@triton.jit
def _load_codes(body, rows, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Load the bytes of `rows`; return (mask, offsets, bytes), each (GROUP, bytes of a block)."""
    NBYTES: tl.constexpr = BLOCK // 2 if KIND == INT4 else BLOCK
    columns = tl.arange(0, NBYTES)
    mask = (rows < blocks)[:, None]
    offsets = rows.to(tl.int64)[:, None] * NBYTES + columns[None, :]
    return mask, offsets, tl.load(body + offsets, mask=mask, other=0)


@triton.jit
def _larger(left, right):
    """Return the maximum, of which a NaN is one."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scales(peaks, INVERSE_LIMIT: tl.constexpr, LARGEST_SCALE: tl.constexpr):
    """Return (scale, multiplier, is finite) of each block from its largest size."""
    finite = peaks < float("inf")
    raw = peaks * INVERSE_LIMIT
    scales = ((raw.to(tl.int32, bitcast=True) + _SCALE_SLACK) & -256).to(tl.float32, bitcast=True)
    scales = tl.minimum(scales, LARGEST_SCALE)
    scales = tl.where(scales < _SMALLEST_SCALE, 0.0, scales)
    inverses = tl.where(finite & (scales > 0.0), tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales), 0.0)
    nan = tl.full(peaks.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(finite, scales, nan), inverses, finite


@triton.jit
def _noise(row_places, columns, seed):
    """Return the noise of two elements half a block apart: of `_mix` of (seed, place of the first) both ends."""
    rows = row_places * _PLACE_FACTOR + seed.to(tl.uint32, bitcast=True)
    hashed = rows[:, None] + (columns.to(tl.uint32) * _PLACE_FACTOR)[None, :]
    hashed = (hashed ^ (hashed >> 16)) * 0x7FEB352D
    hashed = (hashed ^ (hashed >> 15)) * 0x846CA68B
    high = (hashed ^ (hashed >> 16)) & _NOISE_MASK
    # The last step of `_mix` leaves the first bits as they are.
    return (hashed >> (32 - _NOISE_BITS)).to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def _codes(
    ratios,
    finite,
    noise,
    LIMIT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KIND: tl.constexpr,
    FP8_CAST: tl.constexpr,
):
    """Return integers whose low bits are the codes: 0 where a block is not finite, and ratios may be NaN.

    No finite ratio is far enough beyond the limit to be rounded to the nearest code but the last.
    """
    if KIND != FP8 and STOCHASTIC:
        # By integers that count 2^-NOISE_BITS. The limits of a block make 0 of NaN too.
        reach = tl.where(finite, LIMIT * (_NOISE_MASK + 1), 0.0).to(tl.int32)
        noised = (ratios + _FIXER).to(tl.int32, bitcast=True) + noise
        codes = tl.minimum(tl.maximum(noised, _FIXER_BITS - reach), _FIXER_BITS + reach) >> _NOISE_BITS
    else:
        ratios = tl.where(finite, ratios, 0.0)
        if KIND == FP8:
            codes = _fp8_cast_codes(ratios) if FP8_CAST else _fp8_codes(ratios, noise, LIMIT, STOCHASTIC)
        else:
            codes = (ratios + _ROUNDER).to(tl.int32, bitcast=True)  # two's complement
    return codes


@triton.jit
def _fp8_codes(ratios, noise, LIMIT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return float8_e4m3fn bits by arithmetic: the device's cast does not round stochastically, and may be missing."""
    sizes = tl.minimum(tl.abs(ratios), LIMIT)
    # The distance of two neighbours is 2^(exponent - 3), and 2^-9 below the smallest normal number, 2^-6.
    exponents = tl.maximum((sizes.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    steps = sizes * ((130 - exponents) << 23).to(tl.float32, bitcast=True)
    if STOCHASTIC:
        counts = ((steps + _FIXER).to(tl.int32, bitcast=True) + noise) >> _NOISE_BITS
    else:
        counts = (steps + _ROUNDER).to(tl.int32, bitcast=True)
    signs = (ratios.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.minimum(((exponents + 6) << 3) + (counts & 0x1F), 0x7E) | signs


@triton.jit
def _fp8_cast_codes(ratios):
    return ratios.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _byte_values(codes, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return the float32 values of one-byte codes, before the scale.

    By integer operations: converting from 8 bits takes an instruction of a quarter of their rate or less.
    """
    if KIND == INT8:
        bits = _four_at_once(codes, _BYTES) if PTX else codes.to(tl.int32) ^ _BYTE_BITS
        values = bits.to(tl.float32, bitcast=True) - _BYTE_ZERO
    elif PTX:
        values = _four_at_once(codes, _FP8_VALUES).to(tl.float32, bitcast=True)
    else:
        bits = ((codes.to(tl.int32) << 24) >> 4) & _FP8_BITS
        values = bits.to(tl.float32, bitcast=True) * _FP8_FACTOR
    return values


@triton.jit
def _low(codes, PTX: tl.constexpr):
    bits = _four_at_once(codes, _LOW_NIBBLES) if PTX else (codes.to(tl.int32) & 0xF) ^ _NIBBLE_BITS
    return bits.to(tl.float32, bitcast=True) - _NIBBLE_ZERO


@triton.jit
def _high(codes, PTX: tl.constexpr):
    """Return 16 times the codes, which need not be shifted so."""
    bits = _four_at_once(codes, _HIGH_NIBBLES) if PTX else (codes.to(tl.int32) & 0xF0) ^ _BYTE_BITS
    return bits.to(tl.float32, bitcast=True) - _BYTE_ZERO


@triton.jit
def _four_at_once(codes, PROGRAM: tl.constexpr):
    """Return the bits of float32s that PTX makes of bytes, four of a register."""
    return tl.inline_asm_elementwise(PROGRAM, "=r,=r,=r,=r,r", [codes], dtype=tl.int32, is_pure=True, pack=4)
