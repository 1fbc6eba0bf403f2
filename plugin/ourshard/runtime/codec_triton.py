"""The codecs of `codec.py` on CUDA: launch the kernels of `codec_kernels.py`. Notes are in `codec.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ourshard.config import Codec
from ourshard.runtime import codec_kernels
from ourshard.runtime.codec import BlockCodec

# Elements of a tile. With 4 warps each thread holds 32: enough loads in flight, no spills.
TILE_NUMEL = 4096
WARPS = 4
# A sum holds its totals beside what is loaded: fewer elements a thread, so that more threads fit on a processor.
SUM_WARPS = 8
TOGETHER = 8  # parts of a sum whose loads are under way at once, where that divides their number
# From here on (Ada, Hopper) an NVIDIA device converts between float8_e4m3fn and other dtypes.
FP8_CAPABILITY = (8, 9)
_KINDS = {Codec.INT8: codec_kernels.INT8, Codec.INT4: codec_kernels.INT4, Codec.FP8: codec_kernels.FP8}


def encode(codec: BlockCodec, src: Tensor, out: Tensor, seed: int, parts: int) -> None:
    # Kernels take the seed as int32, whatever its value, so that one compiled kernel serves every seed.
    signed_seed = seed - (1 << 32) if seed >> 31 else seed
    constants = {
        "STOCHASTIC": codec.stochastic,
        "LIMIT": codec.limit,
        "INVERSE_LIMIT": 1.0 / codec.limit,
        "LARGEST_SCALE": codec.largest_scale,
        "FP8_CAST": not codec.stochastic and _casts_fp8(src),
        "num_warps": WARPS,
    }
    _launch(codec, codec_kernels.encode, src, out, parts, signed_seed, **constants)


def decode(codec: BlockCodec, src: Tensor, out: Tensor, parts: int) -> None:
    _launch(codec, codec_kernels.decode, out, src, parts, PTX=_takes_ptx(codec, out), num_warps=WARPS)


def decode_sum(codec: BlockCodec, src: Tensor, out: Tensor, scale: float, parts: int) -> None:
    constants = {
        "TOGETHER": math.gcd(parts, TOGETHER),
        "EXACT": math.frexp(scale)[0] == 0.5,  # a power of two
        "PTX": _takes_ptx(codec, out),
        "num_warps": SUM_WARPS,
    }
    _launch(codec, codec_kernels.decode_sum, out, src, 1, float(scale), parts, **constants)


def _takes_ptx(codec: BlockCodec, tensor: Tensor) -> bool:
    """Say whether the device knows the instructions that the kernels have to decode messages of `codec`."""
    return _casts_fp8(tensor) if codec.kind is Codec.FP8 else _is_nvidia(tensor)


def _is_nvidia(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None


def _casts_fp8(tensor: Tensor) -> bool:
    return _is_nvidia(tensor) and torch.cuda.get_device_capability(tensor.device) >= FP8_CAPABILITY


def _launch(
    codec: BlockCodec, kernel: Any, values: Tensor, message: Tensor, parts: int, *arguments: float, **constants: float
) -> None:
    """Run `kernel` over the blocks of each of `parts` equal parts of `values`."""
    part_numel = values.numel() // parts
    blocks = part_numel // codec.block
    if blocks == 0:
        return
    group = max(1, TILE_NUMEL // codec.block)
    part_nbytes = codec.nbytes(part_numel)
    with torch.cuda.device_of(values):
        kernel[(triton.cdiv(blocks, group), parts)](
            values,
            message,
            blocks,
            part_nbytes,
            codec.code_nbytes(part_numel),
            *arguments,
            **constants,
            KIND=_KINDS[codec.kind].value,
            BLOCK=codec.block,
            GROUP=group,
            # Of each message in bytes, which compilers don't see; as much as one load or store takes at most.
            ALIGN=math.gcd(message.data_ptr(), part_nbytes, 16),
            enable_fp_fusion=False,  # the bits would differ from the reference's
        )
