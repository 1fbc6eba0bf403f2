"""The planner's times: of collectives, kernels, streams and the host, each against a formula by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.config import ShardConfig
from ourshard.planning.formulas import OPTIMIZERS, Group, Reach, all_reduce_seconds, kernel_seconds, ring_seconds
from ourshard.planning.hardware import GB, hardware_of
from ourshard.planning.moves import MeshSizes
from ourshard.planning.simulate import simulate
from ourshard.planning.trace import Kernel

from tests.unit.plan_models import PARAMETERS, exact, fake_run, rehearse


def test_a_ring_takes_its_bytes_over_the_slower_link_and_a_latency_a_step() -> None:
    hardware = exact(gpus=16, link_rate=100 * GB, network_rate=10 * GB)
    seconds = ring_seconds(16 * GB, Group(8, 8), hardware, Reach.MIDDLE)
    assert seconds == pytest.approx(14 / 100 + 8.4e-6 + 7 * 3.4e-6)
    seconds = ring_seconds(16 * GB, Group(16, 8), hardware, Reach.MIDDLE)
    assert seconds == pytest.approx(15 / 8 / 10 + 8.4e-6 + 14 * 3.4e-6 + 14e-6)
    assert ring_seconds(16 * GB, Group(1, 1), hardware, Reach.MIDDLE) == 0


def test_an_all_reduce_is_two_rings_or_a_tree_whose_latency_grows_slowly() -> None:
    hardware = exact(gpus=8192, network_rate=10 * GB)
    assert all_reduce_seconds(16 * GB, Group(8, 8), hardware, Reach.BEST) == pytest.approx(
        2 * ring_seconds(16 * GB, Group(8, 8), hardware, Reach.BEST)
    )
    wide = all_reduce_seconds(8000, Group(1024, 1), hardware, Reach.BEST)
    assert wide == pytest.approx(8.4e-6 + 2 * 10 * 14e-6 + 2 * 8000 / (10 * GB))


def test_a_kernel_takes_the_longer_of_computing_and_moving() -> None:
    hardware = exact(flops=1e12, memory_rate=1e12)
    assert kernel_seconds(Kernel(10**12, 10**9), hardware, Reach.BEST) == 1.0
    assert kernel_seconds(Kernel(10**9, 10**12), hardware, Reach.BEST) == 1.0


def test_with_free_links_a_step_takes_as_long_as_it_computes() -> None:
    _, moves = rehearse(ShardConfig(), MeshSizes(8))
    hardware = exact(flops=1e9, memory_rate=1e18, link_rate=1e18)
    timing = simulate(moves, MeshSizes(8), hardware, OPTIMIZERS["adamw"])
    assert timing.compute == pytest.approx(fake_run().flops / 1e9, rel=0.05)  # the rest: the smallest kernels
    assert timing.total == pytest.approx(timing.compute, rel=0.05)


def test_with_free_compute_a_step_takes_as_long_as_the_wire() -> None:
    _, moves = rehearse(ShardConfig(), MeshSizes(8))
    hardware = exact(flops=1e30, memory_rate=1e30, link_rate=1e6)
    timing = simulate(moves, MeshSizes(8), hardware, OPTIMIZERS["adamw"])
    assert timing.wire == pytest.approx(3 * 4 * PARAMETERS * 7 / 8 / 1e6, rel=0.01)
    assert timing.total == pytest.approx(timing.wire, rel=0.01)


def test_prefetch_hides_gathers() -> None:
    mesh, hardware = MeshSizes(8), exact(flops=1e9, link_rate=1e9)
    exposed = []
    for depth in (0, 1):
        config = ShardConfig().replace(prefetch={"forward": depth, "backward": depth})
        exposed.append(simulate(rehearse(config, mesh)[1], mesh, hardware, OPTIMIZERS["sgd"]).exposed)
    assert exposed[1] < 0.7 * exposed[0]


def test_a_slow_host_starves_the_gpu_and_nccl_slows_what_runs_beside_it() -> None:
    _, moves = rehearse(ShardConfig(), MeshSizes(8))
    calls = sum(visit.calls for visit in fake_run().visits)
    slow = exact(flops=1e30, memory_rate=1e30, link_rate=1e30).replace(
        forward_call=(1.0, 1.0), backward_call=(1.0, 1.0), nccl_call=(1.0, 1.0)
    )
    timing = simulate(moves, MeshSizes(8), slow, OPTIMIZERS["sgd"])
    collectives = sum(len(move.collectives) for move in moves)
    assert timing.total == pytest.approx(calls + collectives, rel=0.01)
    assert timing.starved == pytest.approx(calls + collectives, rel=0.02)  # the rest waited for a late gather
    balanced = exact(flops=1e9, link_rate=2e9)
    free, dragged = (
        simulate(moves, MeshSizes(8), balanced.replace(nccl_drag=drag), OPTIMIZERS["sgd"]).compute
        for drag in (0.0, 0.5)
    )
    assert free * 1.1 < dragged <= free * 1.5


def test_a_slow_host_starts_each_call_of_peer_copies_and_waits_for_the_words_of_others_once_a_backward() -> None:
    _, moves = rehearse(ShardConfig(), MeshSizes(8))
    names = [call.name for move in moves for call in move.collectives if call.axis == "shard"]
    gathers, reductions = (names.count(name) for name in ("all_gather", "reduce_scatter"))
    assert gathers > reductions > 0
    slow = exact(flops=1e30, memory_rate=1e30, link_rate=1e30).replace(forward_call=(1.0, 1.0), agreement=(0.5, 0.5))
    of_model = sum(visit.calls for visit in fake_run().visits if not visit.backward)
    timing = simulate(moves, MeshSizes(8), slow, OPTIMIZERS["sgd"], peer=True)
    # Staging, a barrier and 7 pulls for each gather; two barriers, 7 pulls and the sum for each reduction.
    assert timing.total == pytest.approx(of_model + 9 * gathers + 10 * reductions + 0.5, rel=0.01)
    alone = hardware_of("h200", 2).starting(24e-6).without_others()
    assert alone.nccl_call == alone.forward_call
    assert alone.agreement == (0.0, 0.0)


def test_a_host_that_starts_kernels_in_half_the_time_takes_half_of_it_for_all_it_does() -> None:
    usual, quick = (hardware_of("h200", 2).starting(seconds) for seconds in (48e-6, 24e-6))
    for name in ("forward_call", "backward_call", "unit_call", "leaf_call", "nccl_call", "agreement"):
        worst, best = getattr(usual, name)
        assert (worst + best) / 2 == pytest.approx(sum(getattr(hardware_of("h200", 2), name)) / 2)
        assert getattr(quick, name) == pytest.approx((worst / 2, best / 2))


@given(rate=st.floats(1e6, 1e12), faster=st.floats(1.0, 100.0), stage=st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=30, deadline=None)
def test_a_faster_link_is_never_slower_and_worse_is_never_better(rate: float, faster: float, stage: int) -> None:
    mesh = MeshSizes(8)
    _, moves = rehearse(ShardConfig(stage=stage), mesh)
    slow, fast = (
        simulate(moves, mesh, hardware_of("h100", 8).replace(link_rate=r), OPTIMIZERS["adamw"], Reach.BEST).total
        for r in (rate, rate * faster)
    )
    assert fast <= slow * (1 + 1e-9)
    hardware = hardware_of("h100", 8).replace(link_rate=rate)
    best, middle, worst = (
        simulate(moves, mesh, hardware, OPTIMIZERS["adamw"], reach).total
        for reach in (Reach.BEST, Reach.MIDDLE, Reach.WORST)
    )
    assert best <= middle <= worst
