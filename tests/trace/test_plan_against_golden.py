"""The planner's rehearsal, which follows the engine by hand, against the engine's golden order. No ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ourshard.config import ShardConfig
from ourshard.planning.layouts import plan_model
from ourshard.planning.moves import MeshSizes
from ourshard.planning.rehearsal import Rehearsal
from ourshard.planning.trace import trace

from tests.ranks.nets import numbers, toy
from tests.trace.test_golden_traces import CONFIGS, GOLDEN, MICRO_BATCHES


def mesh_of(world: int, config: dict[str, Any]) -> MeshSizes:
    shard = config.get("shard_size", world)
    return MeshSizes(shard, world // shard, node=config.get("secondary_shard_size", 1))


@pytest.mark.trace
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rehearsal_gathers_and_reduces_in_the_golden_order(name: str) -> None:
    mesh = mesh_of(*CONFIGS[name])
    config = ShardConfig.from_dict({**CONFIGS[name][1], "persist_below": 20})
    with torch.device("meta"):
        model = toy()
    planned = plan_model(model, config, mesh)
    inputs = {"x": torch.empty_like(numbers(0, 2), device="meta")}
    visits = trace(model, planned.parts(), inputs, activation_checkpointing=config.activation_checkpointing).visits
    rehearsal = Rehearsal(planned, config, mesh, visits, MICRO_BATCHES, buffers_in_flight=1)
    rehearsal.settled()
    golden = (GOLDEN / f"{name}.txt").read_text().partition("\n\n")[0].splitlines()
    assert rehearsal.order == [line for line in golden if not line.startswith("--")]
