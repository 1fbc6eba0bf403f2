"""`ShardCheckpointCallback`: a Trainer resumes from what it writes, the last good one stays, and SIGTERM is heard."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.trainer_callbacks import ShardCheckpointCallback, ShardEMACallback
from safetensors.torch import load_file

from tests.integrations.trainer_runs import (
    ROWS,
    Case,
    Tokens,
    adapted,
    arguments,
    enable,
    llama,
    logged,
    quiet,
    whole_state,
)

STEPS = 6
DROPPING = {"attention_dropout": 0.1}  # a resumed run must have the random states too


def train(
    output: str, *, stage: int = 3, peft: str | None = None, resume: bool = False, strike: int = 0, **options: Any
) -> dict[str, Any]:
    """Train with a callback if there are `options`; `strike`: rank 1 gets SIGTERM at the end of that step."""
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback

    quiet()
    enable({"stage": stage, "persist_below": 64})

    class Strike(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == strike and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    case = Case(steps=STEPS, config=DROPPING)
    trainer = Trainer(
        model=adapted(llama(**case.config), peft),
        args=arguments(case, Path(output), dist.get_world_size(), eval_strategy="steps", eval_steps=2, seed=3),
        train_dataset=Tokens(ROWS),
        eval_dataset=Tokens(8, seed=1),
        callbacks=[Strike(), *([ShardEMACallback(0.5), ShardCheckpointCallback(**options)] if options else [])],
    )
    where = ShardCheckpointCallback.newest(Path(output, "sharded")) if resume else None
    with logged(logging.ERROR) as told:
        trainer.train(resume_from_checkpoint=where)
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return {"losses": losses, "state": whole_state(trainer.model), "logged": told, "step": trainer.state.global_step}


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.ranks
def test_saves_change_nothing_and_a_trainer_goes_on_from_them(ranks: Any, tmp_path: Path) -> None:
    plain = ranks(2)(train, str(tmp_path / "plain"))[0]
    export = tmp_path / "whole"
    saved = ranks(2)(train, str(tmp_path / "run"), every_steps=2, keep=2, export=str(export))[0]
    assert saved["losses"] == plain["losses"]
    assert saved["logged"] == []
    root = tmp_path / "run" / "sharded"
    assert folders(root) == ["checkpoint-4", "checkpoint-6"]

    average = load_file(tmp_path / "run" / "ema.safetensors")
    shutil.rmtree(root / "checkpoint-6")
    again = ranks(2)(train, str(tmp_path / "run"), resume=True, every_steps=100)[0]
    assert again["losses"] == plain["losses"]  # those to step 4 from the checkpoint
    assert all(torch.equal(again["state"][name], value) for name, value in plain["state"].items())
    assert folders(root) == ["checkpoint-4", "checkpoint-6"]  # the last step is saved
    resumed = load_file(tmp_path / "run" / "ema.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in average.items())

    shutil.rmtree(root / "checkpoint-6")
    elsewhere = ranks(1)(train, str(tmp_path / "run"), stage=1, resume=True, every_steps=100)[0]
    assert elsewhere["step"] == STEPS

    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(export).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in plain["state"].items())


@pytest.mark.ranks
def test_adapters_go_on_from_them_too(ranks: Any, tmp_path: Path) -> None:
    """CASES I04."""
    export = str(tmp_path / "adapter")
    whole = ranks(2)(train, str(tmp_path), peft="lora", every_steps=4, export=export)[0]
    assert "adapter_model.safetensors" in folders(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "sharded" / "checkpoint-6")
    again = ranks(2)(train, str(tmp_path), peft="lora", resume=True, every_steps=100)[0]
    assert again["losses"] == whole["losses"]
    assert all(torch.equal(again["state"][name], value) for name, value in whole["state"].items())


@pytest.mark.ranks
def test_sigterm_on_one_rank_is_saved_before_training_ends(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2)(train, str(tmp_path), strike=2, every_minutes=60.0)
    assert first["step"] == second["step"] < STEPS
    assert folders(tmp_path / "sharded") == [f"checkpoint-{first['step']}"]


@pytest.mark.ranks
def test_the_clock_of_rank_0_says_when(ranks: Any, tmp_path: Path) -> None:
    ranks(2)(train, str(tmp_path), every_minutes=1e-9, keep=None)
    numbers = sorted(int(name.removeprefix("checkpoint-")) for name in folders(tmp_path / "sharded"))
    assert numbers[0] == 2  # its flag is known one step later
    assert numbers[-1] == STEPS


@pytest.mark.ranks
def test_a_disk_that_fails_loses_the_save_and_not_the_training(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    first, second = ranks(2)(train, str(tmp_path), folder=str(tmp_path / "file"), every_steps=3)
    assert first["step"] == STEPS
    assert [text.split(":")[0] for text in first["logged"]] == [
        "A checkpoint was not written, and training goes on",
        "A checkpoint was not written, and training goes on",
        "2 saves of this training failed; the last",
    ]
    assert second["logged"] == []


def test_a_model_that_is_not_sharded_is_refused_and_so_are_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="Linear is not sharded"):
        ShardCheckpointCallback().on_train_begin(None, None, None, model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="keep is 0"):
        ShardCheckpointCallback(keep=0)
