"""Every way to ask for ourshard under a Trainer ends in the same training, with the config that was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import free_port, launch, run_cli
from tests.integrations.trainer_runs import ROWS, SETTINGS, Case, Tokens, enable, llama, quiet, run

pytestmark = pytest.mark.ranks

GIVEN: dict[str, Any] = {**SETTINGS, "per_device_train_batch_size": 2, "max_steps": 2}
# As words of a command line.
WORDS = [
    *("--per_device_train_batch_size", "2", "--max_steps", "2", "--logging_steps", "1", "--learning_rate", "1e-2"),
    *("--save_strategy", "no", "--report_to", "none", "--use_cpu", "true", "--disable_tqdm", "true"),
]
DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}


def parsed(folder: str, words: list[str]) -> Any:
    from ourshard import ShardTrainingArguments
    from transformers import HfArgumentParser

    return HfArgumentParser(ShardTrainingArguments).parse_args_into_dataclasses(["--output_dir", folder, *words])[0]


def made(folder: str, **fields: Any) -> Any:
    from ourshard import ShardTrainingArguments

    return ShardTrainingArguments(folder, **GIVEN, **fields)


def plain(folder: str, **fields: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(folder, **GIVEN, **fields)


def switched(folder: str, **fields: Any) -> Any:
    """Make plain arguments where the environment asks for ourshard, as a launcher's does."""
    import os

    os.environ["ACCELERATE_USE_OURSHARD"] = "true"
    return plain(folder, **fields)


def trained(args: Any, callbacks: Any = None) -> tuple[Any, list[float]]:
    """Return the stage of the model that a Trainer trained, None for an unsharded one, and its losses."""
    import ourshard
    from transformers import Trainer

    quiet()
    trainer = Trainer(llama(), args, train_dataset=Tokens(ROWS), callbacks=callbacks)
    trainer.train()
    engine = ourshard.engine_of(trainer.model)
    stage = None if engine is None else int(engine.config.stage)
    return stage, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def own_accelerator(folder: str) -> tuple[Any, list[float]]:
    """Train with an Accelerator that was made with a plugin, in a plain loop."""
    import ourshard
    import torch
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    quiet()
    accelerator = Accelerator(cpu=True, ourshard_plugin=ShardPlugin({"stage": 2}))
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, losses = accelerator.process_index, []
    for step in range(2):
        ids = Tokens(ROWS).tokens[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    engine = ourshard.engine_of(model)
    assert engine is not None
    return int(engine.config.stage), losses


def entrances(folder: str) -> dict[str, tuple[Any, list[float]]]:
    """Come in by every entrance in turn, on a rank."""
    from ourshard import ShardCallback, ShardPlugin

    yaml = f"{folder}/shard.yaml"
    ways = {
        "dict": lambda: made(folder, ourshard={"stage": 3}),
        "text": lambda: made(folder, ourshard="stage=2,persist_below=50"),
        "file": lambda: made(folder, ourshard=yaml),
        "nothing said": lambda: made(folder),
        "shard_stage": lambda: made(folder, shard_stage=2),
        "parsed text": lambda: parsed(folder, [*WORDS, "--ourshard", "stage=2,persist_below=50"]),
        "parsed JSON": lambda: parsed(folder, [*WORDS, "--ourshard", '{"stage": 1}']),
        "parsed file": lambda: parsed(folder, [*WORDS, "--ourshard", yaml]),
        "parsed fields": lambda: parsed(folder, [*WORDS, "--shard_stage", "2"]),
        "fsdp": lambda: switched(folder, fsdp="shard_grad_op"),
        "fsdp_config": lambda: switched(folder, fsdp="full_shard", fsdp_config={"reshard_after_forward": True}),
        "deepspeed": lambda: switched(folder, deepspeed=DEEPSPEED),
        "deepspeed off": lambda: plain(folder),
    }
    found = {}
    for name, way in ways.items():
        enable(None)
        found[name] = trained(way())
    enable(None)
    args = plain(folder)
    found["callback"] = trained(args, callbacks=[ShardCallback({"stage": 2})])
    enable({"stage": 1})
    found["enable"] = trained(plain(folder))
    enable(None)
    found["callback with plugin"] = trained(plain(folder), callbacks=[ShardCallback(ShardPlugin({"stage": 3}))])
    enable(None)
    found["accelerator"] = own_accelerator(folder)
    return found


STAGES = {
    **{"dict": 3, "text": 2, "file": 1, "nothing said": 3, "shard_stage": 2},
    **{"parsed text": 2, "parsed JSON": 1, "parsed file": 1, "parsed fields": 2},
    **{"fsdp": 3, "fsdp_config": 3, "deepspeed": 2, "deepspeed off": None},
    **{"callback": 2, "enable": 1, "callback with plugin": 3, "accelerator": 2},
}


@pytest.fixture
def shard_yaml(tmp_path: Path) -> Path:
    (tmp_path / "shard.yaml").write_text("stage: 1\n")
    return tmp_path / "shard.yaml"


def test_every_entrance_shards_as_it_says_and_trains_as_one_process(ranks, tmp_path, shard_yaml):
    wanted = run(Case(steps=2), tmp_path / "reference").column("loss")
    for result in ranks(2)(entrances, str(tmp_path), timeout=150):
        assert {name: stage for name, (stage, _) in result.items()} == STAGES
        for name, (_, losses) in result.items():
            if name != "accelerator":
                assert losses == pytest.approx(wanted, abs=1e-5), name


SCRIPT = """
import json, os, sys
from ourshard import ShardTrainingArguments
from transformers import HfArgumentParser
from tests.integrations.test_trainer_entrances import trained
args, = HfArgumentParser(ShardTrainingArguments).parse_args_into_dataclasses()
told = json.dumps([args.process_index, *trained(args)])
os.write(1, f"TOLD{told}\\n".encode())  # in one piece: the ranks share a pipe
"""


def told(stdout: str) -> list[list[Any]]:
    return sorted(json.loads(line.removeprefix("TOLD")) for line in stdout.splitlines() if line.startswith("TOLD"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_a_script_takes_the_config_from_its_command_line(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--output_dir", str(tmp_path), *WORDS, "--ourshard", "stage=2"]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command += ["--master_port", str(free_port()), script, *words]
        out = run_cli(command, env={"PYTHONPATH": "."}).stdout
    else:
        config = tmp_path / "accelerate.yaml"
        config.write_text("distributed_type: OURSHARD\nuse_cpu: true\nnum_processes: 2\n")
        out = launch(script, *words, config=config, env={"PYTHONPATH": "."}).stdout
    wanted = run(Case(steps=2), tmp_path / "reference").column("loss")
    assert [line[:2] for line in told(out)] == [[0, 2], [1, 2]]
    for line in told(out):
        assert line[2] == pytest.approx(wanted, abs=1e-5)
