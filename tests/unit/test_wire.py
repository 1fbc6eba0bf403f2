"""The formulas of bytes on the wire, against the counts of single messages and the ratios of the ZeRO++ paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ourshard.config import BLOCKS, Accumulate, Codec
from ourshard.planning.moves import ring_nbytes
from ourshard.runtime.codec import BlockCodec

from tests.wire_formulas import (
    Axes,
    Step,
    Traffic,
    Transport,
    between_nodes_nbytes,
    by_collective,
    lane_traffic,
    total_nbytes,
)

INT8, INT4 = (BlockCodec(kind, BLOCKS[kind]) for kind in (Codec.INT8, Codec.INT4))
NUMEL = 256 * 64 * 12


def all_to_all_by_message(shard_nbytes: int, ranks: int) -> int:
    """Count what rank 0 sends, one message for each other rank."""
    return sum(shard_nbytes for receiver in range(ranks) if receiver != 0)


@given(world=st.integers(1, 64), stage=st.integers(0, 3), blocks=st.integers(1, 50))
def test_a_stage_sends_two_or_three_times_the_parameters(world: int, stage: int, blocks: int) -> None:
    numel = world * blocks * 16
    sent = total_nbytes(lane_traffic(numel, Axes(world), Step(stage), Transport()))
    assert sent * world == (3 if stage == 3 else 2) * 2 * numel * (world - 1)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_ring_sends_every_shard_but_one(world: int) -> None:
    assert ring_nbytes(world * 40, world) == all_to_all_by_message(40, world)


def test_frozen_lanes_are_gathered_at_stage_3_and_never_reduced() -> None:
    for stage in (0, 1, 2):
        assert lane_traffic(NUMEL, Axes(4), Step(stage, trainable=False), Transport()) == []
    moves = by_collective(lane_traffic(NUMEL, Axes(4), Step(3, trainable=False), Transport()))
    assert moves == {"all_gather/shard": 2 * ring_nbytes(2 * NUMEL, 4)}


def test_accumulation_repeats_what_its_stage_must_repeat() -> None:
    gather, reduce = ring_nbytes(2 * NUMEL, 4), ring_nbytes(4 * NUMEL, 4)
    transport = Transport(grad_nbytes=4)

    def sent(**step: object) -> dict[str, int]:
        return dict(by_collective(lane_traffic(NUMEL, Axes(4), Step(micro_batches=3, **step), transport)))  # type: ignore[arg-type]

    assert sent(stage=1) == {"all_gather/shard": gather, "reduce_scatter/shard": reduce}
    assert sent(stage=2) == {"all_gather/shard": gather, "reduce_scatter/shard": 3 * reduce}
    assert sent(stage=2, accumulate=Accumulate.DEFERRED) == {"all_gather/shard": gather, "reduce_scatter/shard": reduce}
    assert sent(stage=3) == {"all_gather/shard": 6 * gather, "reduce_scatter/shard": 3 * reduce}
    assert sent(stage=3, reshard_after_forward=False)["all_gather/shard"] == 3 * gather


def test_hybrid_adds_one_all_reduce_of_the_shard_over_replicate() -> None:
    moves = lane_traffic(NUMEL, Axes(2, replicate=2), Step(micro_batches=2), Transport())
    assert Traffic("all_reduce", "replicate", NUMEL // 2 * 2, 1) in moves


def test_an_optimizer_over_both_axes_sends_the_same_in_two_halves() -> None:
    shard_only = lane_traffic(NUMEL, Axes(2, replicate=2), Step(), Transport())
    both = lane_traffic(NUMEL, Axes(2, replicate=2), Step(optimizer_over_all=True), Transport())
    assert total_nbytes(both) == total_nbytes(shard_only)
    assert by_collective(both)["reduce_scatter/replicate"] == NUMEL // 2 * 2 // 2
    assert by_collective(both)["all_gather/replicate"] == NUMEL // 2 * 2 // 2
    coded = by_collective(
        lane_traffic(NUMEL, Axes(2, replicate=2), Step(optimizer_over_all=True), Transport(gradients=INT8))
    )
    assert coded["all_to_all/replicate"] == all_to_all_by_message(INT8.nbytes(NUMEL // 4), 2)
    assert "reduce_scatter/replicate" not in coded


def test_hpz_moves_the_backward_gather_into_the_node() -> None:
    axes = Axes(4, node=2)
    plain = by_collective(lane_traffic(NUMEL, axes, Step(), Transport()))
    secondary = by_collective(lane_traffic(NUMEL, axes, Step(secondary_shard_size=2), Transport()))
    assert secondary["all_gather/shard"] * 2 == plain["all_gather/shard"]
    assert secondary["all_gather/node"] == NUMEL * 2 // 2
    accumulated = by_collective(lane_traffic(NUMEL, axes, Step(micro_batches=3, secondary_shard_size=2), Transport()))
    assert accumulated["all_gather/shard"] == secondary["all_gather/shard"]
    assert accumulated["all_gather/node"] == 5 * secondary["all_gather/node"]


def test_qwz_halves_a_gather_but_for_the_scales() -> None:
    plain = by_collective(lane_traffic(NUMEL, Axes(4), Step(), Transport()))["all_gather/shard"]
    coded = by_collective(lane_traffic(NUMEL, Axes(4), Step(), Transport(weights=INT8)))["all_gather/shard"]
    assert coded == plain // 2 + 2 * ring_nbytes(NUMEL // 256 * 4, 4)


@pytest.mark.parametrize("codec", [INT8, INT4])
def test_qgz_sends_one_message_a_rank_in_the_node_and_one_a_node_between(codec: BlockCodec) -> None:
    axes = Axes(8, node=4)
    moves = by_collective(lane_traffic(NUMEL, axes, Step(), Transport(gradients=codec)))
    assert moves["all_to_all/node"] == all_to_all_by_message(codec.nbytes(NUMEL // 4), 4)
    assert moves["all_to_all/cross"] == all_to_all_by_message(codec.nbytes(NUMEL // 8), 2)
    assert "reduce_scatter/shard" not in moves


@pytest.mark.parametrize("axes", [Axes(4), Axes(4, node=4), Axes(4, node=1)])
def test_qgz_in_one_node_or_with_one_rank_a_node_is_one_hop(axes: Axes) -> None:
    moves = by_collective(lane_traffic(NUMEL, axes, Step(), Transport(gradients=INT4)))
    assert moves["all_to_all/shard"] == all_to_all_by_message(INT4.nbytes(NUMEL // 4), 4)


def test_between_nodes_the_paper_s_ratios_hold_but_for_the_scales() -> None:
    axes = Axes(4, node=2)
    plain = between_nodes_nbytes(NUMEL, axes, Step(), Transport())
    secondary = Step(secondary_shard_size=2)
    weights, gradients = 4 / 256 / 2, 4 / 32 / 2  # bytes of scales for each bfloat16 byte
    two = between_nodes_nbytes(NUMEL, axes, secondary, Transport(weights=INT8))
    three = between_nodes_nbytes(NUMEL, axes, secondary, Transport(weights=INT8, gradients=INT4))
    assert two / plain == pytest.approx(0.5 + weights / 3)
    assert three / plain == pytest.approx(0.25 + (weights + gradients) / 3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="3 equal shards"):
        lane_traffic(256, Axes(3), Step(), Transport())
    with pytest.raises(ValueError, match="whole blocks of 256"):
        lane_traffic(128 * 4, Axes(4), Step(), Transport(weights=INT8))
    with pytest.raises(ValueError, match="secondary_shard_size=3"):
        lane_traffic(NUMEL, Axes(4), Step(secondary_shard_size=3), Transport())
    with pytest.raises(ValueError, match="stage 0 has none"):
        lane_traffic(NUMEL, Axes(4), Step(0), Transport(gradients=INT8))
    with pytest.raises(ValueError, match="needs stage 3"):
        Step(2, secondary_shard_size=2)
    with pytest.raises(ValueError, match="gathers in backward"):
        Step(secondary_shard_size=2, reshard_after_forward=False)
    with pytest.raises(ValueError, match="node=3"):
        Axes(4, node=3)
