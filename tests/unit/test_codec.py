"""Properties of the block codecs, on the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.config import Codec, CommunicationConfig
from ourshard.runtime import codec as codec_module
from ourshard.runtime import codec_torch
from ourshard.runtime.codec import BlockCodec, _mix, _mixed_seed
from ourshard.runtime.coded import weight_codec
from ourshard.runtime.coded_gradients import gradient_codec
from torch import Tensor

KINDS = [Codec.INT8, Codec.INT4, Codec.FP8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

codecs = st.builds(
    BlockCodec, kind=st.sampled_from(KINDS), block=st.sampled_from([16, 64, 256]), stochastic=st.booleans()
)


@st.composite
def block_values(draw: st.DrawFn, codec: BlockCodec, dtype: torch.dtype) -> Tensor:
    """Up to 6 blocks, each of its own magnitude, from subnormal to near the largest number of the dtype."""
    blocks = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    info = torch.finfo(dtype)
    low, high = int(math.log2(info.tiny)) - 4, int(math.log2(info.max)) - 4
    exponents = torch.tensor(draw(st.lists(st.integers(low, high), min_size=blocks, max_size=blocks)))
    values = torch.randn(blocks, codec.block, generator=generator, dtype=torch.float64)
    heavy = draw(st.booleans())
    values = values**3 / 8 if heavy else values
    scaled = values * torch.exp2(exponents.double())[:, None]
    return scaled.clamp(-info.max, info.max).to(dtype).flatten()


def encoded(codec: BlockCodec, values: Tensor, seed: int = 0, parts: int = 1) -> Tensor:
    out = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out, seed=seed, parts=parts)
    return out


def decoded(codec: BlockCodec, message: Tensor, dtype: torch.dtype = torch.float32, parts: int = 1) -> Tensor:
    numel = message.numel() * codec.block // codec.nbytes(codec.block)
    out = torch.empty(numel, dtype=dtype)
    codec.decode(message, out, parts=parts)
    return out


def error_bound(codec: BlockCodec, values: Tensor) -> Tensor:
    """The largest error per element that Note [Codec format] allows, in float64; values (blocks, block)."""
    size = values.double().abs()
    # The scale is at most 2^-21 above the quotient, and a value at most 127 * 2^-15 of a step above the last code.
    scale = size.amax(1, keepdim=True) / codec.limit * (1 + 2**-20)
    step = scale.expand_as(size)
    if codec.kind is Codec.FP8:
        step = torch.maximum(scale * 2**-9, size * 2**-3)
    flushed = codec.limit * codec_module.SMALLEST_SCALE
    return (step if codec.stochastic else step / 2) * (1 + 2**-6) + flushed


@given(codec=codecs, dtype=st.sampled_from(DTYPES), data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_error_of_a_block_is_within_half_a_step_or_one_if_stochastic(
    codec: BlockCodec, dtype: torch.dtype, data: st.DataObject
) -> None:
    values = data.draw(block_values(codec, dtype))
    seed = data.draw(st.integers(0, 2**40))
    result = decoded(codec, encoded(codec, values, seed))
    blocks = values.view(-1, codec.block)
    error = (result.view_as(blocks).double() - blocks.double()).abs()
    assert (error <= error_bound(codec, blocks)).all()


@given(codec=codecs, data=st.data())
@settings(max_examples=200, deadline=None)
def test_coding_what_was_decoded_gives_the_same_bytes(codec: BlockCodec, data: st.DataObject) -> None:
    message = encoded(codec, data.draw(block_values(codec, torch.float32)), seed=1)
    assert torch.equal(encoded(codec, decoded(codec, message), seed=2), message)


@given(codec=codecs, dtype=st.sampled_from(DTYPES), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_second_trip_to_the_nearest_changes_no_value_in_any_dtype(
    codec: BlockCodec, dtype: torch.dtype, data: st.DataObject
) -> None:
    once = decoded(codec, encoded(codec, data.draw(block_values(codec, dtype)), seed=1), dtype)
    nearest = replace(codec, stochastic=False)
    assert torch.equal(decoded(nearest, encoded(nearest, once), dtype), once)


@given(codec=codecs, mantissa=st.integers(1 << 15, (1 << 16) - 1), exponent=st.integers(-99, 90), data=st.data())
@settings(max_examples=200, deadline=None)
def test_values_on_the_grid_come_back_exactly(
    codec: BlockCodec, mantissa: int, exponent: int, data: st.DataObject
) -> None:
    scale = math.ldexp(mantissa, exponent - 15)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    if codec.kind is Codec.FP8:
        codes = torch.randint(0, 0x7F, (codec.block,), generator=generator, dtype=torch.uint8)
        grid = codes.view(torch.float8_e4m3fn).float()
    else:
        grid = torch.randint(-int(codec.limit), int(codec.limit) + 1, (codec.block,), generator=generator).float()
    grid[data.draw(st.integers(0, codec.block - 1))] = codec.limit
    values = grid * scale
    assert torch.equal(decoded(codec, encoded(codec, values, seed=data.draw(st.integers(0, 99)))), values)


@given(
    codec=codecs, dtype=st.sampled_from(DTYPES), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data()
)
@settings(max_examples=100, deadline=None)
def test_a_block_that_is_not_finite_decodes_to_nan_and_its_neighbours_do_not(
    codec: BlockCodec, dtype: torch.dtype, bad: float, data: st.DataObject
) -> None:
    values = data.draw(block_values(codec, dtype))
    place = data.draw(st.integers(0, values.numel() - 1))
    clean = decoded(codec, encoded(codec, values)).view(-1, codec.block)
    values[place] = bad
    result = decoded(codec, encoded(codec, values)).view(-1, codec.block)
    spoilt = torch.zeros(result.shape[0], dtype=torch.bool)
    spoilt[place // codec.block] = True
    assert result[spoilt].isnan().all()
    assert torch.equal(result[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_largest_element_of_a_block_comes_back_as_itself(kind: Codec, dtype: torch.dtype, stochastic: bool) -> None:
    codec = BlockCodec(kind, 16, stochastic)
    values = torch.randn(16 * 4096, generator=torch.Generator().manual_seed(0)).to(dtype).view(-1, 16)
    largest = values.abs().argmax(1, keepdim=True)
    result = decoded(codec, encoded(codec, values.flatten(), seed=3), dtype).view_as(values)
    assert torch.equal(result.gather(1, largest), values.gather(1, largest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_zero_huge_and_tiny_blocks(kind: Codec, stochastic: bool) -> None:
    codec = BlockCodec(kind, 16, stochastic)
    largest = torch.finfo(torch.float32).max
    values = torch.zeros(5, 16)
    values[1] = largest
    values[2, 0], values[2, 1] = -largest, largest / 2
    values[3] = 1e-40
    values[4, 7] = 1.0
    result = decoded(codec, encoded(codec, values.flatten(), seed=5)).view(5, 16)
    assert torch.equal(result[0], torch.zeros(16))
    assert result[1:3].isfinite().all()
    assert (result[1] >= largest * (1 - 2**-14)).all()
    assert result[2, 0] <= -largest * (1 - 2**-14)
    assert torch.equal(result[3], torch.zeros(16))
    # 1 / limit is not always a 16-bit scale: the one value comes back within 2^-15.
    assert result[4, 7] == pytest.approx(1.0, rel=2**-15)
    assert result[4].count_nonzero() == 1


@pytest.mark.parametrize(("kind", "nbytes"), [(Codec.INT8, 1040), (Codec.FP8, 1040), (Codec.INT4, 528)])
def test_a_message_is_codes_and_one_float32_a_block(kind: Codec, nbytes: int) -> None:
    assert BlockCodec(kind, 256).nbytes(1024) == nbytes


@pytest.mark.parametrize(
    ("gradients", "block", "expected"), [("int8", None, (256, 256)), ("int4", None, (256, 32)), ("int4", 64, (64, 64))]
)
def test_a_block_of_int4_is_shorter_and_shards_are_whole_blocks_of_both_codecs(
    gradients: str, block: int | None, expected: tuple[int, int]
) -> None:
    config = CommunicationConfig(weights=Codec.INT8, gradients=Codec(gradients), block=block)
    weights, reductions = weight_codec(config), gradient_codec(config)
    assert weights is not None
    assert reductions is not None
    assert (weights.block, reductions.block) == expected
    assert config.alignment == max(expected)
    assert CommunicationConfig(block=block).alignment == 1


def test_the_bytes_are_as_the_note_says() -> None:
    values = torch.arange(-8, 8).float().clamp(-7, 7)
    low, high = torch.arange(-8, 0).clamp_min(-7) & 0xF, torch.arange(0, 8).clamp_max(7)
    message = encoded(BlockCodec(Codec.INT4, 16), values)
    assert message[:8].tolist() == (low | (high << 4)).tolist()
    assert message[8:].view(torch.float32).item() == 1.0
    message = encoded(BlockCodec(Codec.INT8, 16), torch.tensor([127.0, -3.0] * 8))
    assert message[:2].view(torch.int8).tolist() == [127, -3]
    floats = torch.tensor([448.0, -0.001953125, 3.3, -17.0] * 4)
    message = encoded(BlockCodec(Codec.FP8, 16), floats)
    assert torch.equal(message[:16], floats.to(torch.float8_e4m3fn).view(torch.uint8))


def test_nearest_rounds_ties_to_even() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0, -7.0] * 2)
    expected = torch.tensor([0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 7.0, -7.0] * 2)
    assert torch.equal(decoded(BlockCodec(Codec.INT4, 16), encoded(BlockCodec(Codec.INT4, 16), values)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_is_right_on_average(kind: Codec) -> None:
    codec = BlockCodec(kind, 256, stochastic=True)
    values = torch.rand(256, generator=torch.Generator().manual_seed(0)) * 0.98
    values[0] = codec.limit / 127
    rounds = 2000
    total = torch.zeros(256, dtype=torch.float64)
    for seed in range(rounds):
        total += decoded(codec, encoded(codec, values, seed))
    step = error_bound(codec, values[None])[0]
    # The deviation of one rounding is at most half a step: six standard errors of the mean, and the noise's 1/8192.
    assert ((total / rounds - values).abs() <= step * (3 / math.sqrt(rounds) + 2**-13)).all()


def test_stochastic_rounding_depends_on_seed_and_place_only() -> None:
    codec = BlockCodec(Codec.INT8, 64, stochastic=True)
    values = torch.full((codec_torch.CHUNK_NUMEL * 2,), 0.3)
    values[::64] = 1.0
    message = encoded(codec, values, seed=7)
    assert torch.equal(message, encoded(codec, values, seed=7))
    assert not torch.equal(message, encoded(codec, values, seed=8))
    assert not torch.equal(message, encoded(codec, values, seed=7 + 2**32))
    codes = message[: values.numel()].view(-1, 64)[:, 1:]
    half = codes.shape[0] // 2
    assert (codes[:half] != codes[half:]).float().mean() > 0.1, "chunks must not repeat each other's noise"


def test_the_noise_is_the_documented_hash_also_past_32_bits() -> None:
    places = [0, 1, 77, 2**31 + 5, 2**32 - 1, 2**32, 5 * 2**32 + 9]
    seed = _mixed_seed(-3)
    for place in places:
        hashed = _mix(place * codec_torch.PLACE_FACTOR + seed & 0xFFFFFFFF)
        assert codec_torch._noise(torch.empty(1, 2), place, seed).tolist() == [[hashed >> 20, hashed & 0xFFF]]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_messages_one_behind_the_other(kind: Codec) -> None:
    codec = BlockCodec(kind, 16)
    values = torch.randn(3 * 48, generator=torch.Generator().manual_seed(1))
    message = encoded(codec, values, parts=3)
    assert torch.equal(message, torch.cat([encoded(codec, part) for part in values.chunk(3)]))
    assert torch.equal(decoded(codec, message, parts=3), torch.cat([decoded(codec, m) for m in message.chunk(3)]))


@pytest.mark.parametrize("kind", KINDS)
def test_decode_sum_adds_the_messages_in_order_and_overwrites(kind: Codec) -> None:
    codec = BlockCodec(kind, 32)
    generator = torch.Generator().manual_seed(2)
    message = encoded(codec, torch.randn(4 * 96, generator=generator), parts=4)
    expected = torch.zeros(96)
    for part in message.chunk(4):
        codes, scales = part[: codec.code_nbytes(96)], part[codec.code_nbytes(96) :].view(torch.float32)
        expected += decoded(codec, torch.cat((codes, (scales * 0.3).view(torch.uint8))))
    for dtype in DTYPES:
        total = torch.full((96,), torch.nan, dtype=dtype)
        codec.decode_sum(message, total, 0.3, parts=4)
        assert torch.equal(total, expected.to(dtype))


@given(codec=codecs, steps=st.integers(1, 8), seed=st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_error_feedback_loses_nothing_but_the_last_residual(codec: BlockCodec, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    residual = torch.zeros(codec.block)
    sent = torch.zeros(codec.block, dtype=torch.float64)
    given_sum = torch.zeros_like(sent)
    message = torch.empty(codec.nbytes(codec.block), dtype=torch.uint8)
    for step in range(steps):
        gradient = torch.randn(codec.block, generator=generator).to(torch.bfloat16)
        codec.encode_with_feedback(gradient, residual, message, seed=step)
        sent += decoded(codec, message)
        given_sum += gradient
    assert torch.allclose(sent + residual, given_sum, rtol=0, atol=1e-5)


@given(codec=codecs, parts=st.integers(1, 5), seed=st.integers(0, 2**20))
@settings(max_examples=20, deadline=None)
def test_error_feedback_is_the_same_where_few_parts_are_decoded_at_a_time(
    codec: BlockCodec, parts: int, seed: int
) -> None:
    gradient = torch.randn(parts * codec.block, generator=torch.Generator().manual_seed(seed))
    residual = torch.zeros_like(gradient)
    message = torch.empty(codec.nbytes(gradient.numel()), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_module, "FEEDBACK_NUMEL", codec.block)
        codec.encode_with_feedback(gradient, residual, message, seed=seed, parts=parts)
    assert torch.equal(residual, gradient - decoded(codec, message, parts=parts))


def test_error_feedback_forgets_a_step_that_is_not_finite() -> None:
    codec = BlockCodec(Codec.INT4, 16)
    residual = torch.full((32,), 0.25)
    gradient = torch.ones(32)
    gradient[3] = math.inf
    message = torch.empty(codec.nbytes(32), dtype=torch.uint8)
    codec.encode_with_feedback(gradient, residual, message)
    assert decoded(codec, message)[:16].isnan().all()
    assert torch.equal(residual[:16], torch.zeros(16))
    assert residual.isfinite().all()


def test_empty_tensors_pass() -> None:
    codec = BlockCodec(Codec.INT8, 16)
    assert decoded(codec, encoded(codec, torch.empty(0))).numel() == 0


@pytest.mark.parametrize("block", [8, 48, 8192])
def test_a_block_that_kernels_cannot_take_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match="power of two from 16 to 4096"):
        BlockCodec(Codec.INT8, block)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="not a codec"):
        BlockCodec(Codec.AUTO)
    with pytest.raises(ValueError, match="needs a seed"):
        BlockCodec(Codec.INT8, 16, stochastic=True).encode(torch.ones(16), torch.empty(20, dtype=torch.uint8))
    codec = BlockCodec(Codec.INT8, 16)
    with pytest.raises(AssertionError, match="whole blocks"):
        codec.encode(torch.ones(15), torch.empty(20, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="takes 20 bytes; got 24"):
        codec.encode(torch.ones(16), torch.empty(24, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="20 bytes are not 2 messages"):
        codec.decode_sum(torch.empty(20, dtype=torch.uint8), torch.ones(16), parts=2)
