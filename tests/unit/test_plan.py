"""The planner's laws: memory, bytes on the wire, FLOPs and activations, each against a formula by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.config import OptimizerOver, ShardConfig
from ourshard.planning.advice import changes, explain, idle_bytes, missing_bytes, runtime_memory
from ourshard.planning.autocast import CudaAutocast
from ourshard.planning.formulas import OPTIMIZERS
from ourshard.planning.hardware import hardware_of
from ourshard.planning.memory import memory_of
from ourshard.planning.model import load_model, make_batch, parse_input
from ourshard.planning.moves import Does, MeshSizes
from ourshard.planning.plan import Row, candidates, cheapest, halved, mesh_of, scaling, traffic
from ourshard.planning.simulate import simulate
from ourshard.planning.trace import UnitParts, trace
from ourshard.runtime.ledger import Kind
from torch import nn

from tests.unit.plan_models import BLOCKS, HALF, PARAMETERS, UNIT, WIDTH, fake_run, planner, rehearse, stack
from tests.wire_formulas import Axes, Step, Transport, by_collective, lane_traffic

# ---- memory --------------------------------------------------------------------------------------------------


@given(world=st.sampled_from([2, 4, 8, 64]), optimizer=st.sampled_from(sorted(OPTIMIZERS)))
@settings(max_examples=12, deadline=None)
def test_stage_3_holds_its_part_of_masters_and_states_and_of_gradients_until_they_are_stepped(
    world: int, optimizer: str
) -> None:
    rehearsal, moves = rehearse(ShardConfig(), MeshSizes(world))
    memory = memory_of(rehearsal.planned, moves, OPTIMIZERS[optimizer], workspace=0)
    assert memory.at_rest == PARAMETERS / world * (4 + 4 * OPTIMIZERS[optimizer].states)
    step = next(move for move in moves if move.does is Does.STEP)
    assert sum(step.held.values()) + step.in_flight == PARAMETERS / world * (4 + 4)


@pytest.mark.parametrize(("depth", "slots"), [(0, 1), (1, 2), (2, 3)])
def test_stage_3_holds_the_unit_that_computes_and_those_gathered_ahead(depth: int, slots: int) -> None:
    config = ShardConfig().replace(prefetch={"forward": depth, "backward": depth}, precision=HALF)
    _, moves = rehearse(config, MeshSizes(8))
    assert max(move.held[Kind.SLOT] for move in moves) == slots * UNIT * 2
    assert max(move.held.get(Kind.REDUCE, 0) for move in moves) == UNIT * 2


def test_units_that_backward_steps_have_gradients_three_at_a_time_and_step_as_long() -> None:
    mesh, hardware = MeshSizes(8), hardware_of("h100", 8, 1)
    plain, early = (rehearse(ShardConfig(optimizer_in_backward=on), mesh)[1] for on in (False, True))
    assert max(move.held.get(Kind.GRADIENT, 0) for move in early) == 3 * UNIT / 8 * 4
    assert sum(move.does is Does.STEP_UNIT for move in early) == BLOCKS - 2
    stepped = [move.nbytes for move in early if move.does in (Does.STEP_UNIT, Does.STEP)]
    assert sum(stepped) == PARAMETERS / 8 * 4
    times = [simulate(moves, mesh, hardware, OPTIMIZERS["adamw"]) for moves in (plain, early)]
    assert times[1].step == pytest.approx(times[0].step)


def test_each_stage_shards_more() -> None:
    rest = []
    for stage in (0, 1, 2, 3):
        rehearsal, moves = rehearse(ShardConfig(stage=stage).replace(precision=HALF), MeshSizes(8))
        rest.append(memory_of(rehearsal.planned, moves, OPTIMIZERS["adamw"], workspace=0).at_rest)
    whole, shard = PARAMETERS, PARAMETERS // 8
    # masters and two moments in float32; whole parameters in bfloat16; gradients stay where they are whole
    assert rest == [whole * (4 + 4 + 8 + 2), *[whole * 2 + shard * 12] * 2, shard * 12]


def test_the_peak_is_the_sum_of_its_parts_and_never_below_rest() -> None:
    rehearsal, moves = rehearse(ShardConfig().replace(precision=HALF), MeshSizes(8))
    memory = memory_of(rehearsal.planned, moves, OPTIMIZERS["adamw"], inputs=1000)
    assert memory.peak == sum(memory.parts.values()) > memory.at_rest


# ---- bytes on the wire ---------------------------------------------------------------------------------------


@given(
    world=st.sampled_from([1, 2, 4, 8]),
    stage=st.sampled_from([0, 1, 2, 3]),
    reshard=st.booleans(),
    micro_batches=st.sampled_from([1, 3]),
    accumulate=st.sampled_from(["sharded", "deferred"]),
)
@settings(max_examples=40, deadline=None)
def test_a_step_sends_what_the_formulas_say(
    world: int, stage: int, reshard: bool, micro_batches: int, accumulate: str
) -> None:
    config = ShardConfig(stage=stage, reshard_after_forward=reshard).replace(accumulate=accumulate, precision=HALF)
    rehearsal, moves = rehearse(config, MeshSizes(world), micro_batches)
    step = Step(stage, micro_batches, reshard, accumulate=config.accumulate)
    wanted: Counter[str] = Counter()
    for lane in rehearsal.planned.lanes:
        wanted += by_collective(lane_traffic(lane.numel, Axes(world), step, Transport(2, 2)))
    found: Counter[str] = Counter()
    for move in moves:
        for call in move.collectives:
            axis = "shard" if call.axis == "world" else call.axis
            found[f"{call.name}/{axis}"] += call.wire_nbytes(rehearsal.mesh.of(call.axis))
    assert found == wanted


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_stages_send_two_or_three_times_the_parameters(stage: int, times: int) -> None:
    world = 8
    _, moves = rehearse(ShardConfig(stage=stage).replace(precision=HALF), MeshSizes(world))
    hardware = hardware_of("h100", world)
    inside, between = traffic(moves, MeshSizes(world), hardware)
    assert (inside, between) == (times * 2 * PARAMETERS * (world - 1) // world, 0)


def test_hybrid_shard_keeps_gathers_in_the_node() -> None:
    hardware = hardware_of("h100", 16, 2)
    config = ShardConfig(shard_size="node").replace(precision=HALF)
    mesh = mesh_of(config, hardware)
    assert mesh == MeshSizes(8, 2)
    _, moves = rehearse(config, mesh)
    assert all(call.axis == "shard" for move in moves if move.does is Does.GATHER for call in move.collectives)
    _, between = traffic(moves, mesh, hardware)
    assert between == PARAMETERS // 8 * 2  # an all-reduce of the gradient's shard over two nodes: 2 b (2 - 1) / 2


# ---- the fake run --------------------------------------------------------------------------------------------


def test_flops_are_two_for_each_weight_and_row_and_twice_that_in_backward() -> None:
    assert fake_run(samples=4).flops == 6 * PARAMETERS * 4


def test_recomputation_adds_a_forward_and_keeps_only_inputs_of_units() -> None:
    plain, recomputed = fake_run(samples=512), fake_run(samples=512, activation_checkpointing=True)
    # torch stops a recomputation when it has what backward needs: the last product of a unit is not done again
    assert recomputed.flops - plain.flops == 2 * (PARAMETERS // 2) * 512
    forward = [next(v.alive for v in run.visits if v.unit == BLOCKS - 1) for run in (plain, recomputed)]
    row = 512 * WIDTH * 4
    assert forward == [BLOCKS * (4 + 1) * row, BLOCKS * row]  # hidden values and output; output alone


def test_activations_grow_with_the_batch_and_nothing_else_does() -> None:
    one, two = fake_run(samples=8), fake_run(samples=16)
    gradients = UNIT * 4  # of the unit that computes when most is alive, the same for every batch
    assert two.peak - gradients == pytest.approx(2 * (one.peak - gradients), abs=64)
    assert [(visit.unit, visit.backward) for visit in one.visits] == [(v.unit, v.backward) for v in two.visits]


def test_visits_go_through_the_units_and_back() -> None:
    order = [(visit.unit, visit.backward) for visit in fake_run().visits]
    forward = [(unit, False) for unit in range(BLOCKS)]
    backward = [(unit, True) for unit in reversed(range(BLOCKS))]
    assert [visit for visit in order if visit[0] != BLOCKS] == forward + backward


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2000, 32)
            self.head = nn.Linear(32, 2000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids)).sum()

    with torch.device("meta"):
        model = Tied()
        ids = torch.zeros(1, 4, dtype=torch.long)
    watched = [UnitParts([], [model.embed.weight]), UnitParts([])]
    run = trace(model, watched, {"ids": ids})
    assert model.head.weight is model.embed.weight
    assert [visit.graded for visit in run.visits if visit.graded] == [(0,)]


def test_autocast_follows_cuda() -> None:
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    with CudaAutocast(torch.bfloat16):
        assert (x @ w).dtype is torch.bfloat16
        assert nn.functional.linear(x, w).dtype is torch.bfloat16
        half = x.bfloat16()
        assert nn.functional.layer_norm(half, (4,)).dtype is torch.float32
        assert half.softmax(-1).dtype is torch.float32
        assert (half + half).dtype is torch.bfloat16
        assert nn.functional.relu(half).dtype is torch.bfloat16


def test_attention_counts_as_two_products_forward_and_five_backward() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).sum()

    q = torch.zeros(2, 3, 256, 64, device="meta", requires_grad=True)
    run = trace(Attention(), [UnitParts([])], {"q": q})
    assert run.flops == (2 + 5) * 2 * (2 * 3 * 256 * 256 * 64) // 2


# ---- the plan ------------------------------------------------------------------------------------------------


def test_the_cheapest_is_the_fastest_that_fits_and_of_equals_the_smallest() -> None:
    rows = planner().rows(candidates(ShardConfig(), planner().hardware))
    chosen = cheapest(rows)
    assert chosen is not None
    fastest = max(row.tokens_per_second for row in rows)
    equals = [row for row in rows if row.tokens_per_second >= 0.99 * fastest]
    assert chosen.memory.peak == min(row.memory.peak for row in equals)
    small = sorted(row.memory.peak for row in rows)[0]
    rows = planner(memory=small).rows(candidates(ShardConfig(), planner().hardware))
    chosen = cheapest(rows)
    assert chosen is not None
    assert chosen.memory.peak == small
    assert cheapest(planner(memory=1000).rows([ShardConfig()])) is None


def test_candidates_share_over_nodes_only_where_there_are_some() -> None:
    assert all(config.shard_size is None for config in candidates(ShardConfig(), hardware_of("h100", 8)))
    assert any(config.shard_size == "node" for config in candidates(ShardConfig(), hardware_of("h100", 16, 2)))


def test_shards_over_half_of_a_node_are_compared_where_it_is_alone() -> None:
    half = list(halved(ShardConfig(), hardware_of("h100", 8)))
    assert {(config.stage, config.shard_size) for config in half} == {(stage, 4) for stage in (1, 2, 3)}
    assert any(config.shard_optimizer_over is OptimizerOver.ALL for config in half)
    for gpus, nodes, kept in ((2, 1, ()), (7, 1, ()), (16, 2, ()), (8, 1, ("shard_size",))):
        assert list(halved(ShardConfig(), hardware_of("h100", gpus, nodes), kept)) == []


def test_an_optimizer_over_all_ranks_is_a_candidate_over_nodes_and_takes_less_memory() -> None:
    found = planner(16, 2)
    rows = {row.name: row for row in found.rows(candidates(ShardConfig(), found.hardware))}
    shard, over_all = rows["stage 3, in each node"], rows["stage 3, in each node, optimizer over all"]
    assert over_all.memory.optimizer == pytest.approx(shard.memory.optimizer / 2, rel=0.1)  # but for padding
    assert over_all.wire_between == pytest.approx(shard.wire_between, rel=0.1)
    assert not any("over all" in name for name in (row.name for row in planner(8, 1).rows([ShardConfig()])))


def test_a_secondary_shard_is_a_candidate_over_nodes_and_halves_what_leaves_them() -> None:
    def rows(base: ShardConfig, gpus: int, nodes: int) -> list[Row]:
        found = planner(gpus, nodes)
        return found.rows(config for config in candidates(base, found.hardware) if not config.activation_checkpointing)

    over_nodes = {row.name: row for row in rows(ShardConfig(), 16, 2)}
    plain, second = over_nodes["stage 3"], over_nodes["stage 3, second shard over 8"]
    assert plain.wire_between > second.wire_between > plain.wire_between // 2
    assert second.memory.masters > plain.memory.masters
    assert not any("second" in row.name for row in rows(ShardConfig(), 8, 1))
    asked = rows(ShardConfig(secondary_shard_size=4), 8, 1)
    assert [row.name for row in asked if "second" in row.name] == ["stage 3, second shard over 4"]
    with pytest.raises(ValueError, match="over 3 does not divide"):
        planner(8, 1).row(ShardConfig(secondary_shard_size=3))


def test_full_shard_loses_speed_with_ranks_and_hybrid_shard_loses_less() -> None:
    counts = [8, 64, 1024, 16384]
    # The model is so small that a host which takes time would decide.
    instant = planner(8, 1)
    instant.hardware = instant.hardware.replaying()
    full = scaling(instant, ShardConfig(), counts)
    hybrid = scaling(instant, ShardConfig(shard_size=8), counts)
    per_gpu = [full[count].tokens_per_second / count for count in counts]
    assert per_gpu == sorted(per_gpu, reverse=True)
    assert hybrid[16384].tokens_per_second > 2 * full[16384].tokens_per_second


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="shard_size: 3 does not divide 16 ranks"):
        planner().row(ShardConfig(shard_size=3))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "neither a folder"),
        ("nowhere.json", "can't be read"),
        ("tests.unit.plan_models:Stak", "has no 'Stak'.*Did you mean 'Stack'"),
        ("no_such_module:Stack", "can't be imported"),
        ("torch.nn:Linear", "Linear can't be built with nothing .--with KEY=VALUE.: .*in_features"),
        ("builtins:dict", "gives dict, which is no torch module"),
    ],
)
def test_models_that_cannot_be_built_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(source)


def test_inputs_are_read_and_what_is_unknown_is_asked_for() -> None:
    name, tensor = parse_input("x=8x16:bfloat16")
    assert (name, tuple(tensor.shape), tensor.dtype, tensor.is_meta) == ("x", (8, 16), torch.bfloat16, True)
    with pytest.raises(ValueError, match="NAME=SHAPE:DTYPE"):
        parse_input("x=8xa")
    with pytest.raises(ValueError, match="give --input"):
        make_batch(stack(), 1, 1)


# ---- advice --------------------------------------------------------------------------------------------------


def test_advice_names_the_cheapest_change_that_is_enough() -> None:
    whole = PARAMETERS
    config = ShardConfig(stage=1).replace(precision=HALF)
    text = explain(stack(), config, MeshSizes(8), allocated=whole * 20, missing=whole)
    assert "cheapest change that would fit: stage: 3 saves" in text
    text = explain(
        stack(), ShardConfig(stage=0).replace(precision=HALF), MeshSizes(8), allocated=whole * 20, missing=whole
    )
    assert "cheapest change that would fit: stage: 2 saves" in text
    text = explain(stack(), ShardConfig(), MeshSizes(8), allocated=whole * 100, missing=whole)
    assert "activation_checkpointing: true" in text
    config = ShardConfig(activation_checkpointing=True)
    assert "No single change is enough" in explain(stack(), config, MeshSizes(8), allocated=whole * 100, missing=whole)


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    reshard=st.booleans(),
    shards=st.sampled_from([2, 8]),
    replicas=st.sampled_from([1, 4]),
)
@settings(max_examples=30, deadline=None)
def test_each_change_saves_what_it_says(stage: int, reshard: bool, shards: int, replicas: int) -> None:
    config = ShardConfig(stage=stage, reshard_after_forward=reshard, shard_size=shards).replace(precision=HALF)
    mesh = MeshSizes(shards, replicas)
    for change in changes(stack(), config, mesh):
        value = yaml.safe_load(change.value)
        after = MeshSizes(mesh.world) if change.key == "shard_size" else mesh
        now = runtime_memory(stack(), config, mesh).peak
        assert now - runtime_memory(stack(), config.replace(**{change.key: value}), after).peak == change.saves > 0


def test_the_bytes_of_an_error_are_read() -> None:
    assert missing_bytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...") == int(2.5 * 2**30)
    assert missing_bytes("something else") == 0


def test_memory_that_is_there_in_pieces_is_joined_before_anything_costs() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
        "free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.50 GiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large ..."
    )
    missing, idle = missing_bytes(message), idle_bytes(message)
    assert (missing, idle) == (2 * 2**30, int(5.5 * 2**30))
    mesh = MeshSizes(8)
    text = explain(stack(), ShardConfig(), mesh, allocated=70 * 2**30, missing=missing, idle=idle, on_gpu=True)
    assert "would fit: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment" in text
    text = explain(stack(), ShardConfig(), mesh, allocated=70 * 2**30, missing=missing, idle=missing - 1, on_gpu=True)
    assert "expandable_segments" not in text
