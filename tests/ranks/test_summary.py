"""The lines at the start of a run: how the model is sharded, and which options have no effect and why."""

from __future__ import annotations

from typing import Any

import pytest
from ourshard.config import ShardConfig
from ourshard.runtime.api import engine_of, shard_model

from tests.integrations.tiny import tiny


def said(config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    from ourshard.runtime.summary import inactive

    engine = engine_of(shard_model(tiny(), config))
    assert engine is not None
    return engine.summary(), inactive(engine)


@pytest.mark.ranks
def test_the_summary_says_stage_mesh_units_dtypes_tiers_and_memory(ranks: Any) -> None:
    config = {"stage": 3, "precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}, "offload": {"optimizer": "cpu"}}
    text, without_effect = ranks(2)(said, config)[0]
    for words in (
        "stage 3 over 2 ranks on cpu",
        "7,040 parameters (7,040 trainable, 474 whole on every rank",
        "in 3 units, 3 lanes, the largest unit blocks.1 with 4,489",
        "bfloat16/float32/float32",
        "masters and optimizer on the host, parameters on the device",
        "MiB",
        "gradients are shards, reduced in each backward",
    ):
        assert words in text
    assert without_effect == {}
    assert text.splitlines()[1:] == ["ourshard: elements of units: blocks.0 2,077, blocks.1 4,489, the root unit 474"]


def warned(config: dict[str, Any]) -> list[str]:
    import logging

    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ourshard").addHandler(handler)
    try:
        shard_model(tiny(), config)
    finally:
        logging.getLogger("ourshard").removeHandler(handler)
    return told


@pytest.mark.ranks
def test_masters_of_16_bits_are_asked_for_and_warned_of(ranks: Any) -> None:
    """C03: whatever dtype a model computes in, masters are in fp32 unless that is said."""
    narrow = {"precision": {"param_dtype": "bf16", "master_dtype": "bf16"}}
    told, others = ranks(2)(warned, narrow)
    assert len(told) == 1
    assert "master_dtype: bfloat16: a step that changes a weight by less than 1/512 of it is rounded away" in told[0]
    assert others == []
    assert ranks(2)(warned, {"precision": {"param_dtype": "bf16"}}) == [[], []]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("config", "world", "expected"),
    [
        ({"stage": 3}, 1, {"stage"}),
        ({"stage": 3, "shard_size": 1}, 2, {"stage"}),
        ({"stage": 3, "shard_size": 1, "shard_optimizer_over": "all"}, 2, {"stage"}),
        ({"stage": 2, "shard_size": 1, "shard_optimizer_over": "all"}, 2, set()),
        ({"stage": 0, "shard_size": 1, "shard_optimizer_over": "all"}, 2, {"shard_size", "shard_optimizer_over"}),
        ({"stage": 3, "secondary_shard_size": 2, "wrap": {"policy": "none"}}, 4, {"secondary_shard_size"}),
        ({"stage": 0, "shard_size": 1, "timeout": 60.0}, 2, {"shard_size"}),
        ({"stage": 0, "timeout": 60.0}, 1, {"timeout"}),
        (
            {"stage": 2, "reshard_after_forward": False, "prefetch": {"forward": 2}},
            2,
            {"reshard_after_forward", "prefetch.forward"},
        ),
        ({"stage": 3, "reshard_after_forward": False, "prefetch": {"forward": 2}}, 2, set()),
        ({"stage": 2, "keep_last": 10**6}, 2, {"keep_last"}),
        ({"stage": 3, "keep_last": 10}, 2, {"keep_last"}),
        ({"stage": 3, "keep_last": 10**6}, 2, set()),
        ({"stage": 1, "accumulate": "deferred"}, 2, {"accumulate"}),
        ({"stage": 2, "accumulate": "deferred"}, 2, set()),
        (
            {"stage": 2, "shard_optimizer_over": "all", "communication": {"block": 128}},
            2,
            {"shard_optimizer_over", "communication.block"},
        ),
        ({"stage": 3, "communication": {"weights": "int8", "block": 128}}, 2, set()),
        ({"stage": 3, "persist_below": 10**6, "communication": {"weights": "int8"}}, 2, {"communication.weights"}),
        ({"stage": 3, "persist_below": 10**6, "offload": {"optimizer": "cpu"}}, 2, {"offload.optimizer"}),
        (
            {"stage": 3, "offload": {"pin_memory": False, "optimizer_ratio": 0.5}},
            2,
            {"offload.pin_memory", "offload.optimizer_ratio"},
        ),
    ],
)
def test_options_that_change_nothing_are_named_with_the_reason(
    ranks: Any, config: dict[str, Any], world: int, expected: set[str]
) -> None:
    text, without_effect = ranks(world)(said, config)[0]
    shards = text.startswith(("ourshard: stage 2", "ourshard: stage 3")) and "nothing is sharded" not in text
    assert ("reduced in each backward" in text) == (shards and config.get("accumulate") != "deferred")
    assert set(without_effect) == expected
    for key, reason in without_effect.items():
        assert f"ourshard: {key} has no effect: {reason}" in text.splitlines()


def test_units_that_are_kept_are_not_counted_twice() -> None:
    with pytest.raises(ValueError, match=r"keep_last: 100: with reshard_after_forward: false all units stay whole"):
        ShardConfig(keep_last=100, reshard_after_forward=False)
    with pytest.raises(ValueError, match="keep_last: -1 "):
        ShardConfig(keep_last=-1)


def test_skipping_a_save_is_refused_where_saves_do_not_run_in_the_background() -> None:
    with pytest.raises(ValueError, match=r"checkpoint.when_busy: skip is for saves in the background"):
        ShardConfig.from_dict({"checkpoint": {"when_busy": "skip"}})
    ShardConfig.from_dict({"checkpoint": {"when_busy": "skip", "asynchronous": True}})
