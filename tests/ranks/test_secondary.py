"""A secondary shard within the node (hpZ): the same bits as without it, and no gather between nodes but the first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.training import Configs, adamw, assert_same_bits, difference, llama_task, train_all, with_each

pytestmark = pytest.mark.ranks

HPZ: dict[str, Any] = {"secondary_shard_size": 2}
INT8: dict[str, Any] = {"communication": {"weights": "int8", "block": 64}}
PLAIN: Configs = {
    "as it is": {},
    "recomputed": {"activation_checkpointing": True},
    "deferred": {"accumulate": "deferred"},
    "no prefetch": {"prefetch": {"forward": 0, "backward": 0}},
    "on the host": {"offload": {"optimizer": "cpu", "params": "cpu"}},
    "int8": INT8,
    "bf16": {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
}


def half_frozen() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    return model


def check_same_bits(on_ranks: Any, task: Any, plain: Configs, **secondary: Any) -> None:
    """Train with and without a secondary shard, and compare losses, norms and weights of every rank."""
    both = {**plain, **with_each(plain, "hpZ", **(secondary or HPZ))}
    for rank, results in enumerate(on_ranks(train_all, task, both, timeout=180)):
        for name in plain:
            assert_same_bits(results[f"hpZ {name}"], results[name], f"{name} on rank {rank}")


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_has_the_bits_of_plain_stage_3(accumulate, ranks):
    """Tied embeddings are in the root, which has no secondary shard."""
    task = llama_task(optimizer=adamw, accumulate=accumulate, clip=1.0, steps=2, rows=1)
    check_same_bits(ranks(4), task, with_each(PLAIN, "", persist_below=100))


def test_a_frozen_base_is_gathered_from_the_secondary_shard_too(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, steps=2, rows=1)
    task = type(task)(**{**vars(task), "make": half_frozen})
    check_same_bits(ranks(4), task, {"frozen": {"persist_below": 100}})


@pytest.mark.slow
def test_a_hybrid_mesh_of_two_replicas_has_the_bits_of_one_without(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, steps=2, rows=1)
    hybrid = {"shard_size": 4, "persist_below": 100}
    check_same_bits(ranks(8), task, {"hybrid": hybrid, "over all": {**hybrid, "shard_optimizer_over": "all"}})


def count(micro_batches: int, **config: Any) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Return the bytes gathered in a step, those that the lanes say, and the bytes held and expected."""
    from ourshard import engine_of, shard_model

    model = shard_model(llama(), {"persist_below": 100, "ledger": True, **HPZ, **config})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = adamw(model.parameters())
    for step in range(2):
        engine.ledger.reset()
        for micro in range(micro_batches):
            engine.require_sync = micro == micro_batches - 1
            token_loss(model, tokens(step, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected: Counter[str] = Counter()
    held = 0
    for lane in engine.lanes():
        if lane.placement.whole:
            continue
        nbytes = lane.layout.numel * 4
        coded = lane.layout.numel + lane.layout.numel // 64 * 4 if lane.codec is not None else nbytes
        times = micro_batches if lane.unit.rooted else 1
        expected["all_gather/shard"] += times * coded * 3 // 4
        if not lane.unit.rooted:
            expected["all_gather/node"] += (2 * micro_batches - 1) * nbytes // 2
            held += nbytes // 2
    gathered = {name: nbytes for name, nbytes in engine.ledger.wire.items() if name.startswith("all_gather")}
    return gathered, dict(expected), engine.ledger.held["secondary"], held


@pytest.mark.parametrize(("micro_batches", "config"), [(1, {}), (2, {}), (2, INT8)], ids=["one", "two", "int8"])
def test_only_the_first_gather_of_a_step_leaves_the_node(micro_batches, config, ranks):
    for gathered, expected, held, wanted in ranks(4)(count, micro_batches, **config):
        assert gathered == expected
        assert held == wanted > 0


def between(config: dict[str, Any]) -> dict[str, Any]:
    """Change weights, and evaluate, between micro-batches; return what the losses and weights were."""
    from ourshard import engine_of, full_state_dict, gathered, load_full_state_dict, shard_model

    model = shard_model(llama(), {"persist_below": 100, **config})
    engine = engine_of(model)
    assert engine is not None
    optimizer = adamw(model.parameters())
    seen: dict[str, Any] = {"losses": []}

    def micro_batch(number: int, sync: bool = False) -> None:
        engine.require_sync = sync
        loss = token_loss(model, tokens(number, 1))
        loss.backward()
        seen["losses"].append(loss.item())

    micro_batch(0)
    with torch.no_grad():
        seen["losses"].append(token_loss(model, tokens(0, 1)).item())
        for parameter in model.model.layers[0].parameters():
            parameter.copy_(torch.full(parameter.shape, 0.01))
    micro_batch(1)
    with gathered(model.model.layers[1], writeback=True), torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(0.5)
    micro_batch(2)
    load_full_state_dict(model, {**llama(seed=1).state_dict()})
    micro_batch(3, sync=True)
    model.eval()
    token_loss(model, tokens(4, 1)).backward()  # exact, with gradients: not what a codec left
    seen["losses"].append(token_loss(model, tokens(4, 1)).item())
    optimizer.step()
    return {**seen, **full_state_dict(model)}


@pytest.mark.parametrize("config", [{}, INT8], ids=["exact", "int8"])
def test_what_changes_the_weights_makes_the_secondary_shard_stale(config, ranks):
    def told(**more: Any) -> Any:
        return ranks(4)(between, {**config, **more})

    for got, wanted in zip(told(**HPZ), told(), strict=True):
        assert got.pop("losses") == wanted.pop("losses")
        assert difference(got, wanted) == 0


def refusals(worlds: list[dict[str, Any]]) -> list[str]:
    from ourshard import shard_model

    found = []
    for config in worlds:
        with pytest.raises(ValueError, match="secondary_shard_size") as caught:
            shard_model(llama(), config)
        found.append(str(caught.value))
    return found


def test_sizes_that_cannot_work_are_refused_with_the_reason(ranks):
    sizes: list[dict[str, Any]] = [{"secondary_shard_size": size} for size in (1, 3, 4, 8)]
    others = [{**HPZ, "stage": 2}, {**HPZ, "reshard_after_forward": False}, {**HPZ, "shard_size": 2}]
    for one, three, four, eight, stage, whole, hybrid in ranks(4)(refusals, [*sizes, *others]):
        assert "reshard_after_forward: false" in one
        assert three.endswith("over 3 does not divide it; use 2, or leave it out.")
        assert four.endswith("over 4 is the shard itself; use 2, or leave it out.")
        assert "over 8 does not divide" in eight
        assert "needs stage 3" in stage
        assert "nothing is gathered in backward" in whole
        assert hybrid.endswith("over 2 is the shard itself; leave it out.")
