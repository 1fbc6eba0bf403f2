"""Loops that leave optimizer and schedule to DeepSpeed's config, by accelerate's `DummyOptim` and `DummyScheduler`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from ourshard.flags.blocks import build_scheduler
from ourshard.integrations.switch import BLOCKS

from tests.integrations.trainer_runs import ROWS, Tokens, enable, llama, quiet

WRITTEN = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
}
STEPS = 4


def steps_of(accelerator: Any, model: Any, optimizer: Any, schedule: Any) -> tuple[list[float], list[float]]:
    rank, ranks, rates, losses = accelerator.process_index, accelerator.num_processes, [], []
    share = 4 // ranks
    for step in range(STEPS):
        start = 4 * step + share * rank
        ids = Tokens(ROWS).tokens[start : start + share]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return rates, losses


def left_to_the_config(schedule_too: bool) -> tuple[list[float], list[float]]:
    """Train on a rank that a launcher told the blocks; without `schedule_too` the script brings the schedule along."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BLOCKS, json.dumps(WRITTEN if schedule_too else {"optimizer": WRITTEN["optimizer"]}))
        quiet()
        enable({"stage": 3, "persist_below": 50})
        accelerator = Accelerator(cpu=True)
        model = llama()
        optimizer = DummyOptim(model.parameters(), lr=1e-2)
        more = {"total_num_steps": STEPS, "warmup_num_steps": 2} if schedule_too else {"lr_scheduler_callable": by_hand}
        schedule = DummyScheduler(optimizer, **more)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        return steps_of(accelerator, model, optimizer, schedule)


def by_hand(optimizer: torch.optim.Optimizer) -> Any:
    params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": STEPS}
    return build_scheduler({"type": "WarmupDecayLR", "params": params}, optimizer)


def written_out() -> tuple[list[float], list[float]]:
    quiet()
    enable(None)
    accelerator, model = Accelerator(cpu=True), llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    return steps_of(accelerator, *accelerator.prepare(model, optimizer, by_hand(optimizer)))


@pytest.mark.ranks
@pytest.mark.parametrize("schedule_too", [True, False])
def test_dummies_become_what_the_config_says_and_count_steps_not_ranks(ranks, schedule_too):
    rates, losses = written_out()
    for result in ranks(2)(left_to_the_config, schedule_too):
        assert result[0] == pytest.approx(rates)
        assert result[1] == pytest.approx(losses, rel=2e-4)


def test_a_dummy_without_a_block_says_what_is_missing():
    enable({"stage": 1})
    accelerator, model = Accelerator(cpu=True), llama()
    optimizer = DummyOptim(model.parameters())
    with pytest.raises(ValueError, match=r"DummyOptim: .* has no optimizer block, which it stands for; write one, or"):
        accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match=r"DummyScheduler: .* has no scheduler block"):
        accelerator.prepare(DummyScheduler(torch.optim.SGD(model.parameters())))
    enable(None)
