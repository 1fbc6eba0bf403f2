"""The planner's laws where masters, or parameters too, live on the host."""

from __future__ import annotations

from typing import Any

import pytest
from ourshard.config import ShardConfig
from ourshard.planning.formulas import OPTIMIZERS, Reach
from ourshard.planning.hardware import hardware_of
from ourshard.planning.memory import Memory, memory_of
from ourshard.planning.moves import Does, MeshSizes
from ourshard.planning.plan import candidates, describe, offloaded
from ourshard.planning.rehearsal import Rehearsal
from ourshard.planning.report import as_dict, as_table
from ourshard.planning.simulate import simulate
from ourshard.planning.trace import Trace
from ourshard.runtime.disk import BLOCK
from ourshard.runtime.inputs import LEAST_NBYTES

from tests.unit.plan_models import BLOCKS, HALF, PARAMETERS, WIDTH, exact, fake_run, planner, rehearse

CPU = {"optimizer": "cpu"}
BOTH = {"optimizer": "cpu", "params": "cpu"}
DISK = {"optimizer": "nvme", "nvme_path": "/tmp"}
WORLD = 8


def planned_memory(stage: int, offload: dict[str, str], **changes: Any) -> Memory:
    rehearsal, moves = rehearse(ShardConfig(stage=stage).replace(offload=offload, **changes), MeshSizes(WORLD))
    return memory_of(rehearsal.planned, moves, OPTIMIZERS["adamw"], workspace=0)


def test_the_host_has_master_gradient_and_moments_and_the_device_a_shard_in_compute_dtype() -> None:
    memory = planned_memory(3, CPU, precision=HALF)
    assert memory.at_rest == PARAMETERS / WORLD * 2
    assert memory.pinned == PARAMETERS / WORLD * (4 + 4)
    assert memory.host == PARAMETERS / WORLD * (4 + 4 + 8)


def test_with_parameters_on_the_host_nothing_rests_on_the_device() -> None:
    half = planned_memory(3, BOTH, precision=HALF)
    assert half.at_rest == 0
    assert half.pinned == PARAMETERS / WORLD * (4 + 4 + 2)
    assert planned_memory(3, BOTH).pinned == PARAMETERS / WORLD * (4 + 4)  # the master serves as the shard


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_keep_parameters_whole_keep_nothing_else(stage: int) -> None:
    memory = planned_memory(stage, CPU, precision=HALF)
    assert memory.at_rest == PARAMETERS * 2
    assert memory.host == PARAMETERS / WORLD * (4 + 4 + 8)


def test_the_step_takes_as_long_as_the_host_takes() -> None:
    hardware, adamw, mesh = hardware_of("h100", WORLD), OPTIMIZERS["adamw"], MeshSizes(WORLD)
    _, moves = rehearse(ShardConfig().replace(offload=CPU), mesh)
    timing = simulate(moves, mesh, hardware, adamw, Reach.MIDDLE)
    step = next(move for move in moves if move.does is Does.STEP)
    assert step.host_nbytes == PARAMETERS / WORLD * 4
    assert step.nbytes == 0
    assert timing.step == pytest.approx(step.host_nbytes * adamw.moved / hardware.host_rate)


def test_what_stays_on_the_device_steps_while_the_host_steps() -> None:
    hardware, adamw, mesh = hardware_of("h100", WORLD), OPTIMIZERS["adamw"], MeshSizes(WORLD)
    config = ShardConfig(stage=3).replace(offload={**CPU, "optimizer_ratio": 0.5})
    rehearsal, moves = rehearse(config, mesh)
    timing = simulate(moves, mesh, hardware, adamw, Reach.MIDDLE)
    step = next(move for move in moves if move.does is Does.STEP)
    assert 0 < step.host_nbytes <= PARAMETERS / WORLD * 4 / 2
    assert step.host_nbytes + step.nbytes == PARAMETERS / WORLD * 4
    assert timing.step == pytest.approx(step.host_nbytes * adamw.moved / hardware.host_rate)
    memory = memory_of(rehearsal.planned, moves, adamw, workspace=0)
    assert memory.host == step.host_nbytes * 4
    assert memory.masters + memory.optimizer >= step.nbytes * 3


def test_a_step_from_a_disk_takes_as_long_as_the_disk_of_a_node_takes_both_ways() -> None:
    hardware, adamw, mesh = hardware_of("h100", WORLD), OPTIMIZERS["adamw"], MeshSizes(WORLD)
    _, moves = rehearse(ShardConfig(stage=3).replace(offload=DISK), mesh)
    assert simulate(moves, mesh, hardware, adamw, Reach.MIDDLE).step == pytest.approx(
        PARAMETERS * (4 + 8) * 2 / hardware.disk_rate
    )


@pytest.mark.parametrize(("offload", "stages"), [(CPU, {1, 2, 3}), (BOTH, {3}), ({}, {0, 1, 2, 3})])
def test_only_stages_that_the_runtime_takes_are_compared(offload: dict[str, str], stages: set[int]) -> None:
    configs = list(candidates(ShardConfig().replace(offload=offload), hardware_of("h100", WORLD)))
    assert {config.stage for config in configs} == stages
    assert all(("on cpu" in describe(config)) == bool(offload) for config in configs)


def test_the_table_shows_the_host_where_it_has_something() -> None:
    hardware = hardware_of("h100", WORLD)
    for offload in ({}, CPU, DISK):
        row = planner().row(ShardConfig().replace(offload=offload))
        headers = [column.header for column in as_table([row], hardware, None).columns]
        assert ("host MiB" in headers) == bool(offload)
        assert ("disk MiB" in headers) == (offload is DISK)
        assert (as_dict(row)["memory"]["disk"] > 0) == (offload is DISK)
        assert (as_dict(row)["memory"]["host"] > 0) == bool(offload)


def test_what_the_host_of_a_node_can_not_hold_does_not_fit() -> None:
    config = ShardConfig().replace(offload=CPU)
    row = planner().row(config)
    need = row.memory.host * planner().hardware.gpus_per_node
    assert need > 0
    for limit, fits in ((None, True), (need, True), (need - 1, False)):
        assert planner(host_memory=limit).row(config).fits is fits
    assert planner(host_memory=1).row(ShardConfig()).fits


def test_a_disk_has_masters_and_moments_and_the_host_gradients_and_windows() -> None:
    memory = planned_memory(3, DISK, precision=HALF)
    assert memory.at_rest == PARAMETERS / WORLD * 2
    assert memory.disk == PARAMETERS / WORLD * (4 + 8)
    rehearsal, _ = rehearse(ShardConfig(stage=3).replace(offload=DISK, precision=HALF), MeshSizes(WORLD))
    longest = max(lane.shard_numel for lane in rehearsal.planned.lanes)
    window = -(-longest * 4 // BLOCK) * BLOCK * 3  # master and two moments
    assert memory.host == memory.pinned == PARAMETERS / WORLD * 4 + 3 * window


PARAMS_DISK = {"params": "nvme", "nvme_path": "/tmp"}


def test_a_disk_has_the_shards_in_compute_dtype_and_the_host_windows_for_them() -> None:
    rehearsal, moves = rehearse(
        ShardConfig(stage=3).replace(offload={**CPU, **PARAMS_DISK}, precision=HALF), MeshSizes(WORLD)
    )
    memory = memory_of(rehearsal.planned, moves, OPTIMIZERS["adamw"], workspace=0)
    longest = max(lane.shard_numel for lane in rehearsal.planned.lanes)
    assert memory.disk == PARAMETERS / WORLD * 2
    assert memory.at_rest == 0
    assert memory.host == PARAMETERS / WORLD * 16 + 3 * -(-longest * 2 // BLOCK) * BLOCK
    assert memory.pinned == PARAMETERS / WORLD * 8 + 3 * -(-longest * 2 // BLOCK) * BLOCK
    alone = planned_memory(3, PARAMS_DISK, precision=HALF)
    assert (alone.disk, alone.host) == (0, 0)  # masters on the device serve


def test_gathers_of_a_disk_take_as_long_as_the_disk_takes_to_read() -> None:
    hardware, adamw, mesh = hardware_of("h100", WORLD), OPTIMIZERS["adamw"], MeshSizes(WORLD)
    slow = hardware.replace(disk_rate=1e6)
    offload = {**CPU, **PARAMS_DISK}
    _, moves = rehearse(ShardConfig(stage=3).replace(offload=offload, precision=HALF), mesh)
    read = sum(move.disk_nbytes for move in moves if move.does is Does.GATHER)
    assert read >= 2 * 2 * PARAMETERS / WORLD * 0.8  # forward and backward; the root is gathered once
    timing = simulate(moves, mesh, slow, adamw, Reach.MIDDLE)
    assert timing.total == pytest.approx((read + PARAMETERS / WORLD * 2) * WORLD / 1e6, rel=0.01)


def test_an_overlapped_step_costs_what_the_next_forward_does_not_hide() -> None:
    """The last unit is waited for; what a forward computes before it is beside the step."""
    hardware, adamw, mesh = hardware_of("h100", WORLD), OPTIMIZERS["adamw"], MeshSizes(WORLD)
    slow = hardware.replace(host_rate=1e7)  # the step takes longer than everything else
    _, waited = rehearse(ShardConfig(stage=3).replace(offload=CPU), mesh)
    _, behind = rehearse(ShardConfig(stage=3).replace(offload={**CPU, "overlap_step": True}), mesh)
    before, after = (simulate(moves, mesh, slow, adamw, Reach.MIDDLE) for moves in (waited, behind))
    step = PARAMETERS / WORLD * 4 * adamw.moved / 1e7
    assert before.step == pytest.approx(step)
    assert after.step == 0.0
    assert after.total > step
    assert after.starved >= step * 0.8  # compute waits for the host, which waits for the step


# ---- inputs of recomputed units --------------------------------------------------------------------------------


def offloaded_run(samples: int = LEAST_NBYTES // (4 * WIDTH)) -> Trace:
    return fake_run(samples, activation_checkpointing=True, offload_inputs=True)


def test_inputs_on_the_host_are_on_the_device_while_they_travel() -> None:
    run, plain = offloaded_run(), fake_run(LEAST_NBYTES // (4 * WIDTH), activation_checkpointing=True)
    moved = BLOCKS - 1  # the first unit's is the batch, which the loop holds
    assert run.on_host == moved * LEAST_NBYTES
    last = [next(v.alive for v in each.visits if v.unit == moved) for each in (plain, run)]
    assert last == [BLOCKS * LEAST_NBYTES, 2 * LEAST_NBYTES]  # inputs and output of the last unit; these alone
    ways = [[v.copied // LEAST_NBYTES for v in run.visits if v.backward is way] for way in (False, True)]
    assert [sum(way) for way in ways] == [moved, moved - 1]  # the last one stays until backward asks for it
    assert run.flops == plain.flops
    assert run.peak < plain.peak


def test_inputs_below_the_least_stay() -> None:
    run = offloaded_run(samples=64)
    assert (run.on_host, sum(visit.copied for visit in run.visits)) == (0, 0)
    assert run == fake_run(64, activation_checkpointing=True)


def test_no_more_is_pinned_than_the_config_allows() -> None:
    pinned = planner().row(ShardConfig().replace(offload=CPU)).memory.pinned
    for changes, expected in (
        ({"max_pinned": 1000}, 1000),
        ({"max_pinned": 10**12}, pinned),
        ({"pin_memory": False}, 0),
    ):
        assert planner().row(ShardConfig().replace(offload={**CPU, **changes})).memory.pinned == expected


def test_inputs_on_the_host_take_memory_there_and_the_time_of_their_copies() -> None:
    config, mesh = ShardConfig(activation_checkpointing=True).replace(offload={"activations": "cpu"}), MeshSizes(WORLD)
    run, sgd = offloaded_run(), OPTIMIZERS["sgd"]
    rehearsal = Rehearsal(rehearse(config, mesh)[0].planned, config, mesh, run.visits)
    moves = rehearsal.settled()
    memory = memory_of(rehearsal.planned, moves, sgd, workspace=0, offloaded=run.on_host)
    assert memory.host == memory.pinned == run.on_host
    hardware = exact(flops=1e30, memory_rate=1e30, link_rate=1e30, host_link_rate=1e6)
    slow = simulate(moves, mesh, hardware, sgd)
    assert slow.total == pytest.approx((2 * BLOCKS - 3) * LEAST_NBYTES / 1e6, rel=0.01)
    assert slow.exposed == pytest.approx(slow.total, rel=0.01)
    hidden = simulate(moves, mesh, hardware.replace(host_link_rate=1e30), sgd)
    assert hidden.total < 0.01 * slow.total


def test_inputs_on_the_host_are_tried_where_nothing_fits_and_named() -> None:
    configs = list(offloaded(ShardConfig(), hardware_of("h100", 8)))
    tried = {(c.offload.activations.value, c.offload.optimizer.value, c.offload.params.value) for c in configs}
    none, cpu = "none", "cpu"
    assert tried == {(cpu, none, none), (none, cpu, none), (none, cpu, cpu), (cpu, cpu, cpu)}
    assert all(c.activation_checkpointing for c in configs if c.offload.activations.value == cpu)
    assert describe(configs[0]).endswith("recomputed, inputs on cpu")


def test_a_folder_on_a_disk_is_tried_too_where_there_is_one() -> None:
    base = ShardConfig().replace(offload={"nvme_path": "/data"})
    configs = list(offloaded(base, hardware_of("h100", 8), {"offload.nvme_path"}))
    tried = {(c.offload.optimizer.value, c.offload.params.value) for c in configs}
    assert tried == {("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")}
    assert {c.offload.nvme_path for c in configs} == {"/data"}
    assert {c.stage for c in configs if c.offload.params.value == "nvme"} == {3}
    assert "optimizer on nvme, parameters on nvme" in describe(configs[-1])
