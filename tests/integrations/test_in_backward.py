"""Accelerate and a Trainer with `optimizer_in_backward`: the same training, and what it does not go with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integrations.trainer_runs import Case, enable, quiet, run
from tests.ranks.nets import toy

pytestmark = pytest.mark.ranks

SHARD = {"persist_below": 50, "stage": 3}
EARLY = {**SHARD, "optimizer_in_backward": True}
SETTINGS = {
    "max_grad_norm": 0.0,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def trains(folder: Any) -> tuple[Any, Any, Any]:
    """Train with the option, without, and with it from the other's first checkpoint."""
    case = Case(arguments=SETTINGS, steps=3)
    early, plain = (run(case, folder / name, shard, 2) for name, shard in (("early", EARLY), ("plain", SHARD)))
    return early, plain, run(case, folder / "early", EARLY, 2, resume=str(folder / "plain" / "checkpoint-1"))


def test_a_trainer_trains_evaluates_saves_and_resumes_with_the_same_bits(
    ranks: Callable[..., Any], tmp_path: Any
) -> None:
    for early, plain, resumed in ranks(2)(trains, tmp_path, timeout=60):
        assert early.logs == plain.logs
        assert len(early.column("loss")) == 3
        assert len(early.column("grad_norm")) == 3
        assert resumed.logs[2:] == plain.logs[2:]
        for name, value in plain.state.items():
            assert torch.equal(value, early.state[name])
            assert torch.equal(value, resumed.state[name])


def refused(folder: Any) -> list[str]:
    """Return what each way to look at all gradients before a step is told, before a batch was run."""
    from accelerate import Accelerator
    from ourshard.integrations.plugin import ShardPlugin

    def clips() -> None:
        run(Case(), folder, EARLY, 2)

    def scales() -> None:
        run(Case(arguments={**SETTINGS, "fp16": True}), folder, EARLY, 2)

    def clips_by_plugin() -> None:
        enable(None)
        Accelerator(cpu=True, ourshard_plugin=ShardPlugin(EARLY, gradient_clipping=0.5)).prepare(toy())

    told = []
    quiet()
    for use in (clips, scales, clips_by_plugin):
        try:
            use()
        except ValueError as error:
            told.append(str(error))
    return told


def test_clipping_and_loss_scaling_are_refused_before_training(ranks: Callable[..., Any], tmp_path: Any) -> None:
    clips, scales, by_plugin = ranks(2)(refused, tmp_path)[0]
    assert clips.startswith("TrainingArguments(max_grad_norm=1.0): with optimizer_in_backward units are stepped")
    assert "max_grad_norm=0" in clips
    assert scales.startswith("optimizer_in_backward: with loss scaling (fp16)")
    assert by_plugin.startswith("gradient_clipping: 0.5: with optimizer_in_backward")
