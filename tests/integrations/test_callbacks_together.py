"""All callbacks at once train as none does, bit for bit; and what docs/callbacks.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import ROOT
from tests.integrations.trainer_runs import ROWS, Case, Tokens, arguments, enable, llama, quiet, whole_state

STEPS = 6
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 1": {"stage": 1},
    "hybrid, masters on the host": {"stage": 3, "shard_size": 1, "offload": {"optimizer": "cpu"}},
}
SLOWER = [name for name in CONFIGS if name != "stage 3"]
GIVEN: dict[str, Any] = {  # evaluations, saves of the Trainer and accumulation between the callbacks
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
}


def everyone(folder: Path) -> list[Any]:
    """Return every callback, each as busy as it can be."""
    from ourshard import trainer_callbacks as ours

    return [
        ours.ShardMonitorCallback(peak_flops=1e12),
        ours.ShardCheckpointCallback(every_steps=2, export=folder / "whole"),
        ours.ShardProfilerCallback(wait=1, warmup=1, active=2),
        ours.ShardSentinelCallback(every=1, action="raise", straggler=1e6, straggler_every=2),
        ours.ShardEMACallback(0.5, evaluate=True),
    ]


def train(folder: str, shard: dict[str, Any], together: bool) -> dict[str, Any]:
    """Train on this rank; with dropout, so that a callback that draws a random number shows."""
    import torch.distributed as dist
    from transformers import Trainer

    quiet()
    enable({"persist_below": 64, **shard})
    case = Case(steps=STEPS, config={"attention_dropout": 0.1})
    trainer = Trainer(
        model=llama(**case.config),
        args=arguments(case, Path(folder), dist.get_world_size(), **GIVEN),
        train_dataset=Tokens(ROWS),
        eval_dataset=Tokens(8, seed=1),
        callbacks=everyone(Path(folder)) if together else [],
    )
    trainer.train()
    engine = trainer.model._ourshard
    assert engine.measuring.meter is None
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "loss": [log["loss"] for log in logs],
        "norm": [log["grad_norm"] for log in logs],
        "monitored": all("tokens_per_second" in log and "wire_mb" in log for log in logs),
        "evaluated": [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log],
        "state": whole_state(trainer.model),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("config", ["stage 3", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)])
def test_all_callbacks_together_change_nothing_in_training(ranks: Any, tmp_path: Path, config: str) -> None:
    shard = CONFIGS[config]
    (plain, _), (watched, _) = (ranks(2)(train, str(tmp_path / name), shard, name == "all") for name in ("none", "all"))
    assert watched["loss"] == plain["loss"]
    assert watched["norm"] == plain["norm"]
    assert all(torch.equal(watched["state"][name], value) for name, value in plain["state"].items())
    assert watched["monitored"]
    assert all(mean != weights for mean, weights in zip(watched["evaluated"], plain["evaluated"], strict=True))

    made = {str(path.relative_to(tmp_path / "all")) for path in (tmp_path / "all").rglob("*")}
    assert made >= {
        "shard_monitor.html",
        "sharded/checkpoint-6/ourshard",
        "whole/model.safetensors",
        "profile/profile.json",
        "profile/trace-rank-1.json.gz",
        "checkpoint-6/ema.safetensors",
        "ema.safetensors",
    }


def reads(folder: str) -> list[str]:
    """Let a callback of a user read the model on one rank, in every event, among all of ours; return what it saw."""
    from transformers import Trainer, TrainerCallback

    quiet()
    enable({"stage": 3, "persist_below": 64})
    told: list[str] = []

    class Reads(TrainerCallback):  # type: ignore[misc]
        """Reads a shape, which is there, and a value, which is elsewhere, on rank 0."""

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def look(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                if args.process_index == 0:
                    weight = model.lm_head.weight
                    try:
                        told.append(f"{name}: {tuple(weight.shape)} {weight.norm().item():.4f}")
                    except RuntimeError as error:
                        told.append(f"{name}: {tuple(weight.shape)} {'ourshard.gathered(model)' in str(error)}")

            return look

    args = arguments(Case(steps=2), Path(folder), 2, **{**GIVEN, "save_steps": 2})
    callbacks = [Reads(), *everyone(Path(folder)), Reads()]
    trainer = Trainer(llama(), args, train_dataset=Tokens(ROWS), eval_dataset=Tokens(8, seed=1), callbacks=callbacks)
    trainer.train()
    return [*told, str(trainer.state.global_step)]


@pytest.mark.ranks
def test_reading_the_model_on_one_rank_among_our_callbacks_is_safe(ranks: Any, tmp_path: Path) -> None:
    """D07, I10: no hang and no wrong value, at any event; before the model is sharded it is there."""
    first, second = ranks(2)(reads, str(tmp_path))
    assert first[-1] == second[-1] == "2"
    seen = {text.partition(":")[0]: text.partition(": ")[2] for text in first[:-1]}
    assert seen.pop("on_init_end").startswith("(101, 32) ")
    assert set(seen) >= {"on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_log", "on_train_end"}
    assert set(seen.values()) == {"(101, 32) True"}


def runs_page(folder: str) -> list[str]:
    """Run the blocks of the page one after the other on this rank, in an empty folder; return the classes shown."""
    import os

    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback

    quiet()
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/callbacks.md").read_text(), re.MULTILINE | re.DOTALL)
    before = Path.cwd()
    Path(folder).mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        for block in blocks:
            enable({"stage": 3, "persist_below": 64})
            args = arguments(Case(steps=2), Path("run"), dist.get_world_size())
            names = {"Trainer": Trainer, "model": llama(), "args": args, "data": Tokens(ROWS)}
            exec(block, names)
            if ".train(" not in block:
                names["trainer"].train()
            assert names["trainer"].state.global_step == 2
            assert any(isinstance(each, TrainerCallback) for each in names["trainer"].callback_handler.callbacks)
    finally:
        os.chdir(before)
    return re.findall(r"import (Shard\w+)", "".join(blocks))


@pytest.mark.ranks
def test_every_callback_is_on_the_page_and_its_code_runs(ranks: Any, tmp_path: Path) -> None:
    from ourshard import trainer_callbacks

    shown = ranks(2)(runs_page, str(tmp_path))
    assert sorted(shown[0]) == sorted(trainer_callbacks.__all__)
    assert (tmp_path / "run" / "whole" / "config.json").is_file()
