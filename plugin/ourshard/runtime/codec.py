"""Block codecs for collectives on slow links: int8, int4 and fp8 (e4m3) with one scale a block.

Note [Codec format]
A message is `numel` elements as codes, then one float32 scale for each block, in the same bytes, so that a hop is one
collective. Element `i` of a block decodes to `code * scale`.
- int8: a code in [-127, 127] is one byte. fp8: a code is a float8_e4m3fn of at most 448 in size.
- int4: a code is in [-7, 7]; one byte has element `i` of its block low and element `i + block / 2` high.
- The scale is absmax / limit, cut to 16 bits of mantissa. So code * scale is exact in float32, and the largest element
  always has the code `limit`, and in bfloat16 and float16 comes back as itself. Coding what was decoded changes
  nothing: in float32 with either rounding, in the two short types with rounding to the nearest.
- A block with a NaN or an infinity has the scale NaN and codes 0: all of it decodes to NaN, so overflow checks see it.
- A block whose scale would be below 2^-100 decodes to zeros. This keeps subnormal numbers, which devices treat
  differently, out of the format, and out of what kernels make of a scale.

Note [Same bits everywhere]
`codec_torch` (any device) and `codec_triton` (CUDA) give the same bytes and the same decoded bits: every step is one
IEEE float32 operation or an integer one, nothing is fused, rounding is to the nearest, ties to even. Stochastic
rounding adds noise that is a hash of the seed and the element's place, not the state of a generator; elements `i` and
`i + block / 2` of a block share one hash.

A buffer may hold several messages one behind the other (what an all-gather or all-to-all delivers): `parts`.
Source of the scheme: Wang et al., 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model
Training".
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import struct
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ourshard.config import Codec

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("ourshard")

SCALE_NBYTES = 4
# A block is one row of a kernel's tile; longer rows don't fit its registers, and one outlier would cost more elements.
MAX_BLOCK = 4096
_CODE_BITS = {Codec.INT8: 8, Codec.FP8: 8, Codec.INT4: 4}
_LIMITS = {Codec.INT8: 127.0, Codec.FP8: 448.0, Codec.INT4: 7.0}
# Stochastic rounding rounds to the nearest k / 4096, adds a number below 1 of as many bits from the hash, and rounds
# down. Coarser than the error of value / scale (2^-16), so that a value on the grid is always coded as itself; the
# chance to round up is off by at most 1/8192.
NOISE_BITS = 12
SMALLEST_SCALE = 2.0**-100
# Added to the bits of absmax / limit before the low 8 are dropped. The quotient of a decoded block is off by less than
# two units in the last place; this lets it round up to the scale that it was coded with.
SCALE_SLACK = 8
FEEDBACK_NUMEL = 1 << 24  # elements decoded at a time for error feedback: 64 MiB beside the buffers
_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Encode flat float tensors into bytes, and back. `block` elements share a scale; see Note [Codec format].

    Every call works on the current stream of its tensors' device. On CUDA none allocates, but for
    `encode_with_feedback`. The planner's `align` makes every part a multiple of `block`.
    """

    kind: Codec
    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _CODE_BITS:
            raise ValueError(f"communication: {self.kind.value!r} is not a codec; use int8, int4 or fp8.")
        if not 16 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"communication.block: {self.block!r} must be a power of two from 16 to {MAX_BLOCK}.")

    @property
    def limit(self) -> float:
        """The largest code."""
        return _LIMITS[self.kind]

    @property
    def largest_scale(self) -> float:
        """The largest scale of 16 bits of mantissa whose product with `limit` is a finite float32."""
        (bits,) = struct.unpack("<I", struct.pack("<f", torch.finfo(torch.float32).max / self.limit))
        (largest,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFF00))
        return largest

    def code_nbytes(self, numel: int) -> int:
        return numel * _CODE_BITS[self.kind] // 8

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of `numel` elements, scales included."""
        assert numel % self.block == 0, f"{numel} elements are not whole blocks of {self.block}"
        return self.code_nbytes(numel) + numel // self.block * SCALE_NBYTES

    def encode(self, src: Tensor, out: Tensor, *, seed: int | None = None, parts: int = 1) -> None:
        """Encode `src` (flat, float) into `out` (uint8, `nbytes(src.numel())`), as `parts` messages of equal size.

        `seed` is needed for stochastic rounding and unused without; give each call and each rank its own.
        """
        if self.stochastic and seed is None:
            raise ValueError("stochastic rounding needs a seed")
        self._check(src, out, parts)
        _backend(src).encode(self, src, out, _mixed_seed(seed or 0), parts)

    def decode(self, src: Tensor, out: Tensor, *, parts: int = 1) -> None:
        """Decode `parts` messages in `src` (uint8) into `out` (flat, float): one after the other."""
        self._check(out, src, parts)
        _backend(src).decode(self, src, out, parts)

    def decode_sum(self, src: Tensor, out: Tensor, scale: float = 1.0, *, parts: int = 1) -> None:
        """Overwrite `out` (flat, float) with the sum of `scale` times each of `parts` messages, in float32, in order.

        Each message has as many elements as `out`: this is the reduction of what an all-to-all delivers. Scales of
        messages are multiplied with `scale` before codes are.
        """
        assert src.numel() == parts * self.nbytes(out.numel()), f"{src.numel()} bytes are not {parts} messages"
        self._check(out, src[: self.nbytes(out.numel())], 1)
        _backend(src).decode_sum(self, src, out, scale, parts)

    def encode_with_feedback(
        self, src: Tensor, residual: Tensor, out: Tensor, *, seed: int | None = None, parts: int = 1
    ) -> None:
        """Encode `src + residual`, and leave in `residual` (float32) what the codec lost.

        The loss of a block that is not finite is dropped: a step that the scaler skips must not poison the next. The
        residual has the unit of `src`: where a loss scaler changes its scale, the caller rescales the residual too.
        Source: Seide et al., 2014, "1-bit stochastic gradient descent"; the residual is state that checkpoints keep.
        """
        assert residual.dtype == torch.float32, f"the residual is kept in float32; got {residual.dtype}"
        residual.add_(src)
        self.encode(residual, out, seed=seed, parts=parts)
        step = max(1, parts * FEEDBACK_NUMEL // max(1, residual.numel()))  # parts decoded at a time
        for lost, sent in zip(residual.view(parts, -1).split(step), out.view(parts, -1).split(step), strict=True):
            received = torch.empty_like(lost)
            self.decode(sent.view(-1), received.view(-1), parts=len(lost))
            lost.sub_(received)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _check(self, values: Tensor, message: Tensor, parts: int) -> None:
        assert values.dtype in _SOURCE_DTYPES, f"can't code {values.dtype}"
        assert values.numel() % (parts * self.block) == 0, (
            f"{values.numel()} elements are not {parts} parts of whole blocks of {self.block}"
        )
        assert message.dtype == torch.uint8, f"messages are uint8; got {message.dtype}"
        assert message.numel() == self.nbytes(values.numel()), (
            f"a message of {values.numel()} elements takes {self.nbytes(values.numel())} bytes; got {message.numel()}"
        )
        assert values.is_contiguous(), "codecs work on contiguous values"
        assert message.is_contiguous(), "codecs work on contiguous messages"
        assert values.device == message.device, f"{values.device} and {message.device} differ"
        assert message.storage_offset() % SCALE_NBYTES == 0, "a message starts at a multiple of 4 bytes"


def _mixed_seed(seed: int) -> int:
    """Fold any int into the 32 bits that the kernels take, so that near seeds give unrelated noise."""
    folded = 0
    while True:
        folded = _mix(folded ^ (seed & 0xFFFFFFFF))
        seed >>= 32
        if seed in (0, -1):
            return folded


def _mix(value: int) -> int:
    """The 32-bit finalizer that both backends use for noise (constants of C. Wellons' `lowbias32`)."""
    value ^= value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value ^= value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def _backend(tensor: Tensor) -> ModuleType:
    return _module("codec_triton" if tensor.is_cuda and _has_triton() else "codec_torch")


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"ourshard.runtime.{name}")


@cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning("triton is not installed: quantized collectives run as plain torch operations, which is slow")
    return found
