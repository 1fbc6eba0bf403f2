"""What trackers hear of a sharded run: from the first rank alone, and what one process on the joined batches tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker, on_main_process

from tests.integrations.client_runs import apart, trainer_of, world
from tests.integrations.trainer_runs import VOCAB, Case, Tokens, enable, llama, quiet

pytestmark = pytest.mark.ranks

SHARD = {"persist_below": 50, "stage": 3}


class Lines(GeneralTracker):
    """A tracker as accelerate's guide shows how to write one; it writes a JSON line a call."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._write({"made": True})

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self._write({**values, "step": step})

    @on_main_process
    def _write(self, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def logs_a_loop(folder: str, shard: dict[str, Any] | None) -> list[str]:
    from accelerate import Accelerator, PartialState

    quiet()
    enable(shard)
    rank = PartialState(cpu=True).process_index
    path = Path(folder) / f"told-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, log_with=Lines(path))
    accelerator.init_trackers("a run", config={"rate": 0.1})
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.utils.data.DataLoader(Tokens(12), batch_size=4 // world())
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    for step, batch in enumerate(rows):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), batch["input_ids"].view(-1))
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item(), "norm": norm.item()}, step=step)
    accelerator.end_training()
    return path.read_text().splitlines() if path.exists() else []


def test_a_tracker_of_an_accelerator_hears_of_the_first_rank_alone(ranks, tmp_path):
    wanted = [json.loads(line) for line in logs_a_loop(str(tmp_path / "one"), None)]
    assert [set(line) for line in wanted] == [{"made"}, {"rate"}, *[{"loss", "norm", "step"}] * 3]
    first, second = ranks(2)(logs_a_loop, str(tmp_path / "two"), SHARD)
    assert apart([json.loads(line) for line in first], wanted) < 2e-6
    assert second == []


def scalars(folder: str, shard: dict[str, Any] | None) -> dict[str, list[float]]:
    """Train with TensorBoard; return what its files say, by tag, and how many files there are."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(Case(arguments={**evaluating, "report_to": ["tensorboard"]}), folder, shard)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    files = list(Path(folder).rglob("events.out*"))
    read = EventAccumulator(str(files[0]))
    read.Reload()
    tags = ("train/loss", "train/grad_norm", "train/learning_rate")
    return {"files": [len(files)], **{tag: [scalar.value for scalar in read.Scalars(tag)] for tag in tags}}


def test_tensorboard_has_one_file_with_the_numbers_of_one_process(ranks, tmp_path):
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    wanted = scalars(str(tmp_path / "one"), None)
    assert wanted["files"] == [1]
    for found in ranks(2)(scalars, str(tmp_path / "two"), SHARD):
        assert apart(found, wanted) < 2e-6
