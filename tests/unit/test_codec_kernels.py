"""The Triton kernels give the bits of the reference.

On a CUDA device, and without one in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/unit/test_codec_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from ourshard.config import Codec
from ourshard.runtime import codec_torch
from ourshard.runtime.codec import BlockCodec
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
# The interpreter cuts bfloat16 instead of rounding it, and misreads its subnormal numbers (triton 3.9).
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
PARTS = 3

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


def hard_values(codec: BlockCodec, dtype: torch.dtype, device: str, blocks_of_part: int = 9) -> Tensor:
    """Values of many magnitudes; the first blocks are zero, huge, tiny and not finite; ties and the last code too."""
    generator = torch.Generator().manual_seed(0)
    blocks = PARTS * blocks_of_part
    values = torch.randn(blocks, codec.block, generator=generator)
    values *= torch.exp(2 * torch.randn(blocks, codec.block, generator=generator))
    values[0] = 0
    values[0, 5] = -0.0
    values[1] *= torch.finfo(dtype).max / values[1].abs().max()
    values[2] *= 1e-38
    values[3] = torch.nan
    values[4, 3] = torch.inf
    values[5, 0] = -torch.inf
    values[6] = torch.arange(codec.block) % 29 * 0.5 - 7
    values[6, 0] = codec.limit
    values[7] = torch.finfo(dtype).max
    values[8] *= 2.0**-98  # scales not far above the smallest
    return values.to(dtype).flatten().to(device)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare bit for bit, but for the payload of a NaN, which a conversion may change."""
    integers = torch.int32 if left.dtype == torch.float32 else torch.int16
    same_nan = torch.equal(left.isnan(), right.isnan())
    return same_nan and torch.equal(left.nan_to_num(7).view(integers), right.nan_to_num(7).view(integers))


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4, Codec.FP8])
@pytest.mark.parametrize("block", [16, 256, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_kernels_give_the_bits_of_the_reference(
    kind: Codec, block: int, dtype: torch.dtype, stochastic: bool, device: str
) -> None:
    from ourshard.runtime import codec_triton

    codec = BlockCodec(kind, block, stochastic)
    values = hard_values(codec, dtype, device)
    # Messages need to begin at multiples of 4 bytes, no more.
    message = torch.zeros(4 + codec.nbytes(values.numel()), dtype=torch.uint8, device=device)[4:]
    codec_triton.encode(codec, values, message, 0xFFFFFFF1, PARTS)
    expected = torch.zeros_like(message, device="cpu")
    codec_torch.encode(codec, values.cpu(), expected, 0xFFFFFFF1, PARTS)
    assert torch.equal(message.cpu(), expected)

    result, expected_result = torch.empty_like(values), torch.empty_like(values, device="cpu")
    codec_triton.decode(codec, message, result, PARTS)
    codec_torch.decode(codec, expected, expected_result, PARTS)
    assert same_bits(result.cpu(), expected_result)

    # As many loads together as divide the parts; where the factor is a power of two, multiplied and added at once.
    for parts, factor in ((PARTS, 1 / 3), (2 * PARTS, 0.5), (8, 0.125), (8, 0.3), (1, 1.0)):
        several = message[: message.numel() // PARTS].repeat(parts)
        result = torch.full((values.numel() // PARTS,), torch.nan, dtype=dtype, device=device)
        total = torch.full_like(result, torch.nan, device="cpu")
        codec_triton.decode_sum(codec, several, result, factor, parts)
        codec_torch.decode_sum(codec, several.cpu(), total, factor, parts)
        assert same_bits(result.cpu(), total)


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4, Codec.FP8])
def test_the_torch_reference_gives_the_same_bits_on_the_device(kind: Codec, device: str) -> None:
    codec = BlockCodec(kind, 256)
    values = hard_values(codec, torch.float32, device)
    message = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8, device=device)
    codec_torch.encode(codec, values, message, 1, PARTS)
    expected = torch.zeros_like(message, device="cpu")
    codec_torch.encode(codec, values.cpu(), expected, 1, PARTS)
    assert torch.equal(message.cpu(), expected)


@pytest.mark.gpu
def test_a_cuda_tensor_takes_the_kernels_and_a_large_one_is_right() -> None:
    """More than 2^31 elements: offsets must not wrap."""
    codec = BlockCodec(Codec.INT8)
    values = torch.ones((1 << 31) + 4096, dtype=torch.bfloat16, device="cuda")
    values[-256:] = -2.0
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device="cuda")
    codec.encode(values, message)
    result = torch.empty_like(values)
    codec.decode(message, result)
    assert torch.equal(result, values)
