"""Whole checkpoints of models that were loaded in 16 bits: their masters, which the file of the weights rounds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.checkpoint.foreign.ddp import DdpSource
from ourshard.checkpoint.source import MASTERS, PARAM, TensorKey

from tests.integrations.client_runs import column, trainer_of
from tests.integrations.test_saving import Tied
from tests.integrations.trainer_runs import Case, llama, whole_state

pytestmark = pytest.mark.ranks


def trains(config: dict[str, Any], folder: str, first: int, replace: bool = False) -> dict[str, Any]:
    """Take steps `first` to 4, from the checkpoint of step 2 if they begin there; return what came of it."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin
    from ourshard.runtime.part import engines_in

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({**config, "checkpoint": {"format": "full"}}))
    torch.manual_seed(3)
    model = Tied().to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    if first:
        accelerator.load_state(folder)
    if replace:
        with torch.no_grad():
            model.body.weight.zero_()
        accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
    rows = 12 // accelerator.num_processes
    for step in range(first, 2 if replace else 4):
        tokens = torch.arange(12) + step
        mine = tokens[accelerator.process_index * rows :][:rows]
        accelerator.backward(model(mine).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    (engine,) = engines_in(model)
    return {
        name: lane.whole_view(whole, at).clone()
        for lane in engine.lanes()
        for whole in [lane.gather_master()]
        for at, name in enumerate(parameter.name for parameter in lane.parameters)
    }


@pytest.mark.parametrize("stage", range(4))
def test_masters_go_on_as_if_training_had_not_stopped(ranks: Any, tmp_path: Path, stage: int) -> None:
    """A02, A03: they began anew from the 16 bits of the weights."""
    config = {"stage": stage, "persist_below": 40}
    wanted = ranks(2)(trains, config, str(tmp_path / "saved"), 0)[0]
    assert {value.dtype for value in wanted.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wanted.values())
    for found in ranks(2)(trains, config, str(tmp_path / "saved"), 2):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
    for found in ranks(3)(trains, {"stage": 3, "persist_below": 40}, str(tmp_path / "saved"), 2):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-4)  # gradients are rounded otherwise
    for found in ranks(2)(trains, config, str(tmp_path / "saved"), 2, replace=True):
        assert not found["body.weight"].any()  # of weights that were put there since, masters are not those of the save


def resumes(folder: str, stage: int) -> tuple[list[Any], list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train with a Trainer, and once more from the middle."""
    found = []
    for resume in (None, f"{folder}/checkpoint-2"):
        case = Case(arguments={"bf16": True, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2})
        trainer = trainer_of(case, folder, {"stage": stage, "persist_below": 50}, llama().to(torch.bfloat16))
        trainer.train(resume_from_checkpoint=resume)
        trainer.accelerator.wait_for_everyone()
        if resume is None and dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/checkpoint-4")
        found.append((column(trainer, "loss", "grad_norm"), whole_state(trainer.model)))
    return found[0][0], found[1][0], found[0][1], found[1][1]


def test_a_trainer_of_a_16_bit_model_goes_on_as_if_it_had_not_stopped(ranks: Any, tmp_path: Path) -> None:
    for logs, again, wanted, found in ranks(2)(resumes, str(tmp_path), 3):
        assert again == logs
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    with DdpSource(tmp_path / "checkpoint-2") as source:  # what a conversion reads
        for key, value in saved[MASTERS].items():
            assert torch.equal(source.read(TensorKey(PARAM, key.removeprefix("0/"))), value)
    plain = llama().to(torch.bfloat16)
    torch.optim.AdamW(plain.parameters()).load_state_dict(
        {**saved, "param_groups": [{**saved["param_groups"][0], "params": list(range(len(saved["state"])))}]}
    )
