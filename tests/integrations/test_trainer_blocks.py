"""What `accelerate launch` hands on of a DeepSpeed config: blocks to a Trainer, loss scale and clipping to both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from ourshard.flags.blocks import build_scheduler
from ourshard.integrations.switch import BLOCKS, GRAD_SCALER, GRADIENT_CLIPPING

from tests.integrations.client_runs import trainer_of
from tests.integrations.trainer_runs import ROWS, Case, Tokens, arguments, enable, llama, quiet

CASE = Case(steps=4, arguments={"warmup_steps": 2, "adam_beta2": 0.95, "weight_decay": 0.1})
AUTO = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


def told(folder: str, blocks: dict[str, Any], shard: dict[str, Any] | None) -> tuple[Any, ...]:
    """Train as a worker of a launch that was told `blocks`; return the optimizer's settings, its rates and losses."""
    os.environ[BLOCKS] = json.dumps(blocks)
    try:
        trainer = trainer_of(CASE, folder, shard)
        trainer.train()
    finally:
        del os.environ[BLOCKS]
    return settings_of(trainer)


def settings_of(trainer: Any) -> tuple[Any, ...]:
    group = trainer.optimizer.param_groups[0]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return (
        (group["betas"], group["weight_decay"], len(trainer.optimizer.param_groups)),
        *([log[name] for log in logs] for name in ("learning_rate", "loss")),
    )


def written_out(folder: Path) -> tuple[Any, ...]:
    """Train in one process with the optimizer and the schedule that the blocks stand for, made by hand."""
    from transformers import Trainer

    quiet()
    enable(None)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": 4}
    schedule = build_scheduler({"type": "WarmupDecayLR", "params": params}, optimizer)
    args = arguments(CASE, folder, 1)
    trainer = Trainer(model, args, train_dataset=Tokens(ROWS), optimizers=(optimizer, schedule))
    trainer.train()
    return settings_of(trainer)


@pytest.mark.ranks
def test_a_trainer_makes_the_blocks_of_the_launchers_deepspeed_config_as_written_out_by_hand(ranks, tmp_path):
    """Without them it made its own AdamW, which decays, and fell linearly from the first step."""
    settings, rates, losses = written_out(tmp_path / "reference")
    for result in ranks(2)(told, str(tmp_path / "ranks"), AUTO, {"stage": 3, "persist_below": 50}, timeout=100):
        assert result[0] == settings
        assert result[1] == pytest.approx(rates)
        assert result[2] == pytest.approx(losses, rel=2e-4)


@pytest.fixture
def told_here(monkeypatch):
    """Let this process be a worker that was told so; stock again afterwards."""
    yield lambda name, value: monkeypatch.setenv(name, value if isinstance(value, str) else json.dumps(value))
    enable(None)


def test_a_rate_of_the_launchers_block_that_the_arguments_contradict_is_refused(told_here, tmp_path):
    told_here(BLOCKS, {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}})
    with pytest.raises(ValueError, match=r"lr: the DeepSpeed config of accelerate launch gives 3e-05, but .* 0.01"):
        trainer_of(CASE, str(tmp_path), {"stage": 1})


def test_a_norm_of_the_launcher_that_the_arguments_contradict_is_refused(told_here, tmp_path):
    told_here(GRADIENT_CLIPPING, "0.5")
    with pytest.raises(ValueError, match=r"launch was given 0.5, .* say max_grad_norm=1.0"):
        trainer_of(CASE, str(tmp_path), {"stage": 1})
    agreeing = Case(arguments={"max_grad_norm": 0.5})
    assert trainer_of(agreeing, str(tmp_path), {"stage": 1}).args.max_grad_norm == 0.5


def test_the_loss_scale_of_the_launchers_fp16_block_is_the_accelerators(told_here, capsys):
    told_here(GRAD_SCALER, {"init_scale": 256.0, "growth_interval": 7})
    enable({"stage": 1})
    scaler = Accelerator(cpu=True, mixed_precision="fp16").scaler
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (256.0, 7)
    enable({"stage": 1})
    own = GradScalerKwargs(init_scale=2.0)
    assert Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[own]).scaler.get_scale() == 2.0
    assert "have no effect, because the script gives GradScalerKwargs" in capsys.readouterr().err
