"""H06: no option is accepted and ignored. Each one changes what a run does, is refused, or is named as inactive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ourshard.config import ShardConfig, config_keys
from ourshard.runtime.api import engine_of, shard_model
from ourshard.values import flatten, unflatten

from tests.commands import ROOT
from tests.integrations.tiny import FEATURES, tiny

# What a step does not show, and the test that holds it.
ELSEWHERE = {
    "activation_checkpointing": "tests/ranks/test_recompute.py",  # on CPUs torch's allocator is not counted
    "communication.reduce_op": "tests/ranks/test_sums.py",
    "low_memory_loading": "tests/integrations/test_loading.py",
    "checkpoint.format": "tests/integrations/test_saving.py",
    "checkpoint.asynchronous": "tests/checkpoint/test_background.py",
    "checkpoint.save_dtype": "tests/integrations/test_saving.py",
    "checkpoint.keep": "tests/integrations/test_saving.py",
    "checkpoint.frozen": "tests/checkpoint/test_frozen_base.py",
    "checkpoint.save_on_each_node": "tests/checkpoint/test_several_disks.py",
}
CHANGED: dict[str, Any] = {
    "stage": 2,
    "reshard_after_forward": False,
    "keep_last": 5000,
    "shard_size": 1,
    "shard_optimizer_over": "all",
    "secondary_shard_size": 1,
    "persist_below": 10,
    "wrap.policy": "none",
    "wrap.classes": ["Linear"],
    "wrap.modules": ["blocks.0"],
    "wrap.min_params": 3000,
    "wrap.merge": 2**20,
    "wrap.ignore": ["head"],
    "precision.param_dtype": "bfloat16",
    "precision.reduce_dtype": "bfloat16",
    "precision.master_dtype": "float64",
    "precision.buffer_dtype": "bfloat16",
    "precision.output_dtype": "float64",
    "precision.cast_inputs": False,
    "prefetch.forward": 0,
    "prefetch.backward": 0,
    "accumulate": "deferred",
    "optimizer_in_backward": True,
    "offload.optimizer": "cpu",
    "offload.params": "cpu",
    "offload.activations": "cpu",
    "offload.optimizer_ratio": 0.5,
    "offload.nvme_path": "/tmp",
    "offload.pin_memory": False,
    "offload.max_pinned": 1000,
    "offload.windows": 2,
    "offload.overlap_step": True,
    "communication.weights": "int8",
    "communication.gradients": "int8",
    "communication.error_feedback": True,
    "communication.stochastic_rounding": True,
    "communication.seed": 1,
    "communication.block": 128,
    "communication.two_hop_gathers": True,
    "communication.node_size": 2,
    "communication.transport": "peer",
    "communication.reduce_op": "sum",
    "activation_checkpointing": True,
    "cuda_graph": True,
    "low_memory_loading": False,
    "checkpoint.format": "full",
    "checkpoint.asynchronous": True,
    "checkpoint.when_busy": "skip",
    "checkpoint.save_dtype": "bfloat16",
    "checkpoint.keep": 2,
    "checkpoint.frozen": "exclude",
    "checkpoint.save_on_each_node": True,
    "timeout": 60.0,
    "ledger": False,
}


def counted(engine: Any) -> Any:
    """Return what the ledger has counted since the last call: the order of collectives, bytes, peaks."""
    ledger = engine.ledger
    if ledger is None:
        return None
    told = (ledger.trace, dict(ledger.wire), ledger.peak)
    ledger.trace = []
    ledger.reset()
    return told


def step(config: dict[str, Any]) -> Any:
    """Train two steps, of which the first is recorded; return what can be seen of them, and the inactive keys."""
    from ourshard.runtime.summary import inactive

    model = tiny()
    model.register_buffer("scale", torch.ones(3))
    shard_model(model, config)
    engine = engine_of(model)
    assert engine is not None
    seen: list[Any] = [model.scale.dtype, engine.mesh.control._get_backend(torch.device("cpu")).options._timeout]
    for _ in range(2):
        output = model(torch.ones(2, FEATURES))
        seen += [output.dtype, counted(engine)]
        output.float().sum().backward()
        seen.append(counted(engine))
    return str(seen), engine.summary().splitlines()[0], inactive(engine)


def outcomes() -> dict[str, Any]:
    """Return what each key alone leads to, and under "" what none does: a step, or the message of the refusal."""
    found: dict[str, Any] = {"": step({"ledger": True})}
    for key, value in CHANGED.items():
        try:
            found[key] = step(unflatten({"ledger": True, key: value}))
        except ValueError as error:
            found[key] = str(error)
    return found


def test_each_option_is_tried_with_another_value_than_its_default() -> None:
    default = flatten({**ShardConfig().to_dict(), "ledger": True})
    assert list(CHANGED) == list(config_keys())
    assert [key for key, value in CHANGED.items() if value == default[key]] == []


@pytest.mark.ranks
def test_h06_each_option_changes_a_step_or_is_refused_or_named(ranks: Any) -> None:
    found = ranks(2)(outcomes)[0]
    plain, summary, without_effect = found.pop("")
    assert without_effect == {}
    refused = {key: told for key, told in found.items() if isinstance(told, str)}
    assert [told for key, told in refused.items() if key not in told] == []
    ran = {key: told for key, told in found.items() if key not in refused}
    silent = {key for key, told in ran.items() if told[:2] == (plain, summary) and key not in told[2]}
    assert silent == set(ELSEWHERE)


@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_a_step_does_not_show_is_held_by_another_test(key: str) -> None:
    assert f'"{key.rpartition(".")[2]}"' in (ROOT / ELSEWHERE[key]).read_text()
