"""Masters and states over shard x replicate (I09): what one process gives, on 2 x 2, 4 x 1 and 1 x 4 (X01)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.pairs import joined, pair
from tests.ranks.test_secondary import half_frozen
from tests.ranks.training import (
    Configs,
    adamw,
    compare,
    difference,
    llama_task,
    momentum,
    reference,
    train_all,
    with_each,
)

pytestmark = pytest.mark.ranks

ALL: dict[str, Any] = {"shard_size": 2, "shard_optimizer_over": "all"}
HOST = {"optimizer": "cpu", "params": "cpu"}
PLAIN: Configs = {
    **{f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)},
    "deferred": {"stage": 3, "accumulate": "deferred"},
    "whole until backward": {"stage": 3, "reshard_after_forward": False},
    "nothing persists": {"stage": 3, "persist_below": 0},
    "recomputed": {"stage": 3, "activation_checkpointing": True},
    "masters on the host": {"stage": 3, "offload": {"optimizer": "cpu"}},
    "all on the host": {"stage": 3, "offload": HOST},
    "stage 2 on the host": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "bf16": {"stage": 3, "precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    "bf16 on the host": {"stage": 3, "offload": HOST, "precision": {"param_dtype": "bfloat16"}},
    "int8": {"stage": 3, "communication": {"weights": "int8", "gradients": "int8", "block": 64}},
}


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_training_is_that_of_a_hybrid_mesh_with_masters_over_shard(accumulate, ranks):
    """Two replicas add two numbers, in whichever order; AdamW rounds the end of a tensor otherwise than its middle."""
    task = llama_task(optimizer=adamw, accumulate=accumulate, steps=2, rows=1)
    both = {**with_each(PLAIN, "all", **ALL), **with_each(PLAIN, "shard", shard_size=2)}
    for rank, results in enumerate(ranks(4)(train_all, task, both, timeout=240)):
        for name in PLAIN:
            got, wanted = results[f"all {name}"], results[f"shard {name}"]
            # Means of coded gradients that are not gathered over replicas are not coded again.
            losses, weights = (1e-3, 4e-3) if name == "int8" else (1e-7, 1e-8)
            assert got.losses == pytest.approx(wanted.losses, rel=losses), f"{name} on rank {rank}"
            assert difference(got.state, wanted.state) < weights, f"{name} on rank {rank}"


def test_each_mesh_is_within_1e_6_of_one_process_where_gradients_are_clipped(ranks, tmp_path):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=3, rows=1)
    configs = {
        f"{size} of 4, stage {stage}": {**ALL, "shard_size": size, "stage": stage}
        for size in (1, 2, 4)
        for stage in (1, 3)
    }
    configs["1 of 4 on the host"] = {**ALL, "shard_size": 1, "stage": 3, "offload": HOST}
    disk = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    configs["2 of 4 on a disk"] = {**ALL, "stage": 3, "offload": disk}
    configs["2 of 4 on a disk, shards on the host"] = {**ALL, "stage": 3, "offload": {**disk, "params": "cpu"}}
    compare(ranks(4), task, configs, reference(task, 4))


def test_a_frozen_base_is_within_1e_6_of_one_process(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=2, rows=1)
    task = type(task)(**{**vars(task), "make": half_frozen})
    compare(ranks(4), task, {"frozen": {**ALL, "stage": 3, "persist_below": 0}}, reference(task, 4))


def change_between(config: dict[str, Any]) -> None:
    """Drop gradients between micro-batches, write weights, evaluate; a plain model beside does the same."""
    from ourshard import gathered

    both = pair({**config, "persist_below": 0}, optimizer=momentum)
    models = (both.plain, both.sharded)
    both.train(1)
    both.zero_grad()
    with both.engine.no_sync():
        both.backward(joined(1))
    both.zero_grad()
    with both.engine.no_sync():
        both.backward(joined(2))
        both.backward(joined(3))
    for model in models:
        model.blocks[0].up.weight.grad = None  # of a sum that waits
    both.backward(joined(4))
    both.assert_same_gradients()
    both.backward(joined(5))  # on top of what is synced
    both.assert_same_gradients()
    both.step()
    both.assert_same()
    with torch.no_grad():
        for model in models:
            with gathered(model, writeback=True):
                model.blocks[1].down.weight.mul_(0.5)
            model.blocks[2].up.weight.copy_(torch.ones_like(both.plain.blocks[2].up.weight) / 7)
        batch = joined(6)
        torch.testing.assert_close(both.sharded(batch), both.plain(batch), atol=1e-6, rtol=0)
    both.assert_same()
    both.train(2, first=7)
    both.assert_same()


def all_changes(configs: list[dict[str, Any]]) -> None:
    for config in configs:
        change_between(config)


def test_dropped_gradients_writes_and_evaluations_are_those_of_one_process(ranks):
    stages: list[dict[str, Any]] = [{**ALL, "stage": stage} for stage in (1, 2, 3)]
    others = [{**ALL, "stage": 3, "offload": HOST}, {**ALL, "stage": 3, "shard_size": 1}]
    ranks(4)(all_changes, [*stages, *others])


def hold(config: dict[str, Any]) -> tuple[dict[str, int], int, int, int]:
    """Return what a rank holds after a step, and elements: of lanes, of parameters, of the optimizer's state."""
    from ourshard import engine_of, shard_model

    model = shard_model(llama(), {**config, "persist_below": 0, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = adamw(model.parameters())
    token_loss(model, tokens(0, 1)).backward()
    optimizer.step()
    state = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return engine.ledger.held, sum(lane.layout.numel for lane in engine.lanes()), parameters, state


def test_masters_gradients_and_states_are_a_fourth_and_parameters_a_half(ranks):
    told = ranks(4)(hold, {**ALL, "stage": 3, "precision": {"param_dtype": "bfloat16"}})
    for held, numel, parameters, _ in told:
        assert held["master"] == held["gradient"] == 4 * numel // 4
        assert held["shard"] == 2 * numel // 2
        assert 2 * parameters <= sum(state for *_, state in told) <= 2 * numel  # each element on one rank; padding
