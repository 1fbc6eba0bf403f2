"""Gathers between nodes first, then in the node (MiCS): the bits of one hop, and fewer bytes between nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from ourshard.config import ShardConfig
from ourshard.runtime.mesh import gathers_in_two_hops, node_size

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.training import Configs, adamw, assert_same_bits, llama_task, train_all
from tests.wire_formulas import Axes, Step, Transport, by_collective, lane_traffic

TWO: dict[str, Any] = {"two_hop_gathers": True, "node_size": 2}
INT8: dict[str, Any] = {"weights": "int8", "block": 64}
PLAIN: Configs = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "second shard": {"stage": 3, "secondary_shard_size": 2},
    "on the host": {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    "bf16, recomputed": {"stage": 3, "precision": {"param_dtype": "bfloat16"}, "activation_checkpointing": True},
    "int8": {"stage": 3, "communication": INT8},
    # Reductions have two hops either way.
    "int8 both": {"stage": 3, "communication": {**INT8, "gradients": "int8", "node_size": 2}},
}


def in_two_hops(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "communication": {**config.get("communication", {}), **TWO}}


def check_same_bits(on_ranks: Any, plain: Configs) -> None:
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=2, rows=1)
    small = {name: {"persist_below": 100, **config} for name, config in plain.items()}
    both = {**small, **{f"two hops, {name}": in_two_hops(config) for name, config in small.items()}}
    for rank, results in enumerate(on_ranks(train_all, task, both, timeout=180)):
        for name in plain:
            assert_same_bits(results[f"two hops, {name}"], results[name], f"{name} on rank {rank}")


@pytest.mark.ranks
def test_training_on_two_nodes_of_two_has_the_bits_of_gathers_in_one_hop(ranks):
    check_same_bits(ranks(4), PLAIN)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_hybrid_of_two_replicas_over_two_nodes_each_has_the_bits_of_gathers_in_one_hop(ranks):
    hybrid = {"stage": 3, "shard_size": 4}
    check_same_bits(ranks(8), {"over shard": hybrid, "over all": {**hybrid, "shard_optimizer_over": "all"}})


def gathered_bytes(config: dict[str, Any], **environment: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the bytes that a step gathers, those of the formulas, and the bytes of all lanes."""
    import os

    from ourshard import engine_of, shard_model

    os.environ.update(environment)
    model = shard_model(llama(tie=False), {"persist_below": 0, "ledger": True, **config})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    wanted: Counter[str] = Counter()
    communication = engine.config.communication
    for lane in engine.lanes():
        step = Step(3, reshard_after_forward=not lane.unit.rooted, two_hop_gathers=communication.two_hop_gathers)
        transport = Transport(4, 4, weights=lane.codec)
        wanted += by_collective(lane_traffic(lane.layout.numel, Axes(4, node=2), step, transport))
    engine.ledger.reset()
    token_loss(model, tokens(0, 1)).backward()
    got = {name: nbytes for name, nbytes in engine.ledger.wire.items() if name.startswith("all_gather")}
    assert engine.ledger.held["slot"] == 0
    wanted = Counter({name: nbytes for name, nbytes in wanted.items() if name.startswith("all_gather")})
    return got, dict(wanted), sum(4 * lane.layout.numel for lane in engine.lanes())


@pytest.mark.ranks
@pytest.mark.parametrize("communication", [{}, INT8], ids=["exact", "int8"])
def test_each_byte_goes_once_to_each_node_as_the_formulas_say(communication, ranks):
    """Two nodes of two ranks, as the launcher says: a third of the bytes of one hop are sent over the axis `cross`."""
    config = {"communication": communication}
    for flat, wanted, _ in ranks(4)(gathered_bytes, config):
        assert flat == wanted
        assert set(flat) == {"all_gather/shard"}
    two = {"communication": {**communication, "two_hop_gathers": True}}
    for got, wanted, _ in ranks(4)(gathered_bytes, two, LOCAL_WORLD_SIZE="2"):
        assert got == wanted
        assert set(got) == {"all_gather/cross", "all_gather/node"}
        assert got["all_gather/cross"] * 3 == sum(got.values()) == flat["all_gather/shard"]


def summary(config: dict[str, Any]) -> str:
    from ourshard import engine_of, shard_model

    engine = engine_of(shard_model(llama(), config))
    assert engine is not None
    return engine.summary()


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2])
def test_where_a_copy_is_in_one_node_the_summary_says_that_there_is_one_hop(size, ranks):
    config = {"shard_size": size, "communication": {"two_hop_gathers": True}}
    assert all("two_hop_gathers has no effect" in told for told in ranks(2)(summary, config))


def test_what_cannot_be_two_hops_is_refused_with_the_reason() -> None:
    for communication, why in (
        ({"two_hop_gathers": True, "node_size": 1}, "1 leaves one hop"),
        ({"node_size": 2}, "node_size is for communication.gradients or two_hop_gathers"),
    ):
        with pytest.raises(ValueError, match=why):
            ShardConfig.from_dict({"communication": communication})


def test_the_launcher_says_how_many_ranks_a_node_has() -> None:
    config = ShardConfig.from_dict({"communication": {"two_hop_gathers": True}})
    assert [node_size(config, 8, local) for local in (1, 2, 4, 8, 3)] == [1, 2, 4, 1, 1]
    assert gathers_in_two_hops(config, 2, 4)
    assert not any(gathers_in_two_hops(config, node, cross) for node, cross in ((1, 8), (8, 1)))
