"""A training script as a user writes it, with a word that sends this rank a signal once: `trainer` or `plain`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from tests.integrations import trainer_runs as runs


class Strike(TrainerCallback):
    """Sends rank 1 a signal at the end of step 3, after the checkpoint of step 2, in the first start only."""

    def __init__(self, word: str) -> None:
        self.word = word

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            strike(self.word)


def strike(word: str) -> None:
    """Send rank 1 a signal by name; "MACHINE": this rank, whatever its number, and its torchrun are killed."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if word == "MACHINE":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if word != "none" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), getattr(signal, word))


def trained(folder: Path, word: str) -> tuple[Any, int]:
    case = runs.Case(steps=8, arguments={"save_strategy": "steps", "save_steps": 2})
    args = runs.arguments(case, folder, 2)
    trainer = Trainer(runs.llama(), args, train_dataset=runs.Tokens(runs.ROWS), callbacks=[Strike(word)])
    trainer.train()
    return trainer.model, trainer.state.global_step


class Place:
    """The step of a plain loop, saved with it."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def looped(folder: Path, word: str) -> tuple[Any, int]:
    import ourshard
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        project_config=ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    )
    model = runs.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    place = Place()
    accelerator.register_for_checkpointing(place)
    ourshard.load_after_restart(accelerator)
    rows = runs.Tokens(16)
    for step in range(place.step, 8):
        row = rows[2 * step + accelerator.process_index]
        loss = model(**{name: value[None] for name, value in row.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        place.step = step + 1
        if place.step % 2 == 0:
            accelerator.save_state()
        if place.step == 3:
            strike(word)
        if ourshard.asked_to_end():
            accelerator.save_state()
            break
    return model, place.step


def main(kind: str, folder: Path, word: str) -> None:
    runs.quiet()
    import logging

    logging.getLogger("ourshard").setLevel(logging.WARNING)
    model, step = (trained if kind == "trainer" else looped)(folder, word)
    state = runs.whole_state(model)
    if os.environ["RANK"] == "0":
        torch.save({"step": step, "state": state}, folder / "end.pt")
    print(f"rank {os.environ['RANK']} ended in order", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
