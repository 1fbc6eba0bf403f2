"""The codecs of `codec.py` in plain torch operations: the reference, and what CPUs run. Notes are in that file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ourshard.config import Codec
from ourshard.runtime.codec import NOISE_BITS, SCALE_SLACK, SMALLEST_SCALE, BlockCodec

# Elements worked on at a time: temporaries stay in the cache and small beside the buffers.
CHUNK_NUMEL = 1 << 17
# The golden ratio in 32 bits: spreads neighbouring places over the range before they are hashed.
PLACE_FACTOR = 0x9E3779B1


class _Chunk(NamedTuple):
    """Some blocks of one part: `values` (blocks, block), `codes` (blocks, bytes of a block), `scales` (blocks)."""

    values: Tensor
    codes: Tensor
    scales: Tensor
    place: int  # of the first element in the whole buffer


def encode(codec: BlockCodec, src: Tensor, out: Tensor, seed: int, parts: int) -> None:
    for chunk in _chunks(codec, src, out, parts):
        values = chunk.values.float()
        scales, inverses = _scales(codec, values.abs().amax(dim=1))
        # A multiplication by 0 leaves NaN where the block has one; the codes of such a block are 0.
        ratios = (values * inverses[:, None]).masked_fill_(scales.isnan()[:, None], 0.0)
        chunk.scales.copy_(scales)
        noise = _noise(ratios, chunk.place, seed) if codec.stochastic else None
        chunk.codes.copy_(_pack(codec, ratios, noise))


def decode(codec: BlockCodec, src: Tensor, out: Tensor, parts: int) -> None:
    for chunk in _chunks(codec, out, src, parts):
        chunk.values.copy_(_decoded(codec, chunk))


def decode_sum(codec: BlockCodec, src: Tensor, out: Tensor, scale: float, parts: int) -> None:
    for pieces in zip(*(_chunks(codec, out, message, 1) for message in src.view(parts, -1)), strict=True):
        total = torch.zeros_like(pieces[0].values, dtype=torch.float32)
        for piece in pieces:
            total.add_(_decoded(codec, piece, scale))
        pieces[0].values.copy_(total)


def _chunks(codec: BlockCodec, values: Tensor, message: Tensor, parts: int) -> Iterator[_Chunk]:
    part_numel = values.numel() // parts
    blocks = part_numel // codec.block
    step = max(1, CHUNK_NUMEL // codec.block)
    for part in range(parts if blocks else 0):
        body = message.view(parts, -1)[part]
        code_nbytes = codec.code_nbytes(part_numel)
        codes = body[:code_nbytes].view(blocks, -1)
        scales = body[code_nbytes:].view(torch.float32)
        rows = values.view(parts, blocks, codec.block)[part]
        for start in range(0, blocks, step):
            chosen = slice(start, start + step)
            place = part * part_numel + start * codec.block
            yield _Chunk(rows[chosen], codes[chosen], scales[chosen], place)


def _scales(codec: BlockCodec, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each block, and what its values are multiplied with: 0 where all codes are 0."""
    bits = (absmax * (1.0 / codec.limit)).view(torch.int32)
    scales = ((bits + SCALE_SLACK) & ~0xFF).view(torch.float32).clamp_max(codec.largest_scale)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    inverses = torch.where(scales > 0, 1.0 / scales, 0.0)
    finite = absmax.isfinite()
    return scales.masked_fill(~finite, torch.nan), inverses.masked_fill(~finite, 0.0)


def _pack(codec: BlockCodec, ratios: Tensor, noise: Tensor | None) -> Tensor:
    """Round (blocks, block) ratios to codes and pack them into (blocks, bytes)."""
    if codec.kind is Codec.FP8:
        return _pack_fp8(ratios.clamp_(-codec.limit, codec.limit), noise)
    rounded = ratios.round_() if noise is None else _round(ratios, noise)
    codes = rounded.clamp_(-codec.limit, codec.limit).to(torch.int8).view(torch.uint8)
    if codec.kind is Codec.INT8:
        return codes
    low, high = codes.chunk(2, dim=1)
    return (low & 0xF) | (high << 4)


def _pack_fp8(ratios: Tensor, noise: Tensor | None) -> Tensor:
    if noise is None:
        return ratios.to(torch.float8_e4m3fn).view(torch.uint8)
    # The distance of two neighbours is 2^(exponent - 3), and 2^-9 below the smallest normal number, 2^-6.
    exponent = ((ratios.view(torch.int32) >> 23) & 0xFF).sub_(127).clamp_min_(-6)
    steps = ratios.abs() * ((130 - exponent) << 23).view(torch.float32)
    codes = (((exponent + 6) << 3) + _round(steps, noise).to(torch.int32)).clamp_max_(0x7E).to(torch.uint8)
    return torch.where(ratios.signbit(), codes | 0x80, codes)


def _decoded(codec: BlockCodec, chunk: _Chunk, factor: float = 1.0) -> Tensor:
    """Return the (blocks, block) float32 values of a chunk, with scales `factor` times as large."""
    codes = chunk.codes
    if codec.kind is Codec.FP8:
        values = codes.view(torch.float8_e4m3fn).float()
    elif codec.kind is Codec.INT8:
        values = codes.view(torch.int8).float()
    else:
        # Shifts of int8 keep the sign: the low half moves up first.
        signed = codes.view(torch.int8)
        values = torch.cat(((signed << 4) >> 4, signed >> 4), dim=1).float()
    return values.mul_((chunk.scales * factor)[:, None])


def _round(values: Tensor, noise: Tensor) -> Tensor:
    """Round stochastically, in place: down, after the noise, which counts 2^-NOISE_BITS."""
    return values.mul_(2.0**NOISE_BITS).round_().add_(noise).mul_(2.0**-NOISE_BITS).floor_()


def _noise(like: Tensor, place: int, seed: int) -> Tensor:
    """Return integers of NOISE_BITS bits for (blocks, block) elements, of which the first is at `place`.

    Two elements half a block apart share a hash of (seed, place of the first), `_mix` of `codec.py`: the first has its
    highest bits, the other its lowest.
    """
    blocks, block = like.shape
    columns = torch.arange(block // 2, dtype=torch.int32, device=like.device)
    rows = torch.arange(blocks, dtype=torch.int32, device=like.device).mul_(block).add_(_signed(place))
    hashed = (rows[:, None] + columns).mul_(_signed(PLACE_FACTOR)).add_(_signed(seed))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        hashed.bitwise_xor_(_shifted(hashed, shift)).mul_(_signed(factor))
    hashed.bitwise_xor_(_shifted(hashed, 16))
    return torch.cat((_shifted(hashed, 32 - NOISE_BITS), hashed & (1 << NOISE_BITS) - 1), dim=1)


def _signed(value: int) -> int:
    """Return the int32 with the low 32 bits of `value`; products and sums of int32 wrap, as the kernel's uint32 do."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _shifted(value: Tensor, shift: int) -> Tensor:
    """Shift int32 to the right as if unsigned."""
    return (value >> shift).bitwise_and_((1 << (32 - shift)) - 1)
