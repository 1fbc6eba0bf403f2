"""What is to be done beside weights and optimizer where a run goes on from another engine's folder.

DeepSpeed keeps a scheduler of its own config, and its loss scaler, in its own files, so that the run's folder has no
`scheduler.bin` (`scheduler.pt`) and no `scaler.pt`. Random states lie in a file of each rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ourshard.checkpoint.numbered import of_model
from ourshard.checkpoint.source import detect

if TYPE_CHECKING:
    from accelerate import Accelerator

_POSITION = "last_batch_iteration"  # all that DeepSpeed's schedulers keep
_RANDOM_STATES = re.compile(r"(?:random_states_(\d+)\.pkl|rng_state_(\d+)\.pth)")

logger = logging.getLogger("ourshard")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a foreign checkpoint holds beside weights."""

    has_optimizer: bool
    scheduler: Any  # None: there is none
    scaler: Any


def look(folder: Path, number: int | None = None) -> Kept:
    """Read the description of a foreign checkpoint, and no tensor; `number`: which model of several."""
    with detect(folder, model=number) as source:
        description = source.description
        has_optimizer = any(key.is_state for key in source.tensors) or bool(description.param_groups)
        return Kept(has_optimizer, description.scheduler, description.scaler)


def refuse_scheduler(scheduler: Any, state: Any, folder: Path) -> None:
    """Raise ValueError if the state cannot be put into the scheduler; to be called before anything is loaded."""
    if state is None:
        raise ValueError(
            f"nothing was loaded: {folder} has no state of a scheduler, neither in a file of its own nor in its "
            "engine's, so its place in the schedule is not known. Take the weights alone: `ourshard convert "
            f"{folder} weights --to safetensors` makes a folder for from_pretrained."
        )
    if _POSITION in state and "_schedulers" in scheduler.state_dict():
        raise ValueError(
            f"nothing was loaded: {folder} has the state of a scheduler of DeepSpeed, which is one number of steps; a "
            "scheduler made of several cannot be set to it. Keep the scheduler in the config of DeepSpeed, or use a "
            "single one."
        )


def put_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a scheduler's state: torch's own, or the number of steps that DeepSpeed's schedulers keep.

    The optimizer has its learning rates already; the next step of the scheduler gives the next ones.
    """
    if _POSITION in state:
        steps = int(state[_POSITION]) + 1  # it counts from -1
        own = scheduler.state_dict()
        optimizer = getattr(scheduler, "scheduler", scheduler).optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        state = {**own, "last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    scheduler.load_state_dict(state)


def say_random_states(folder: Path, world: int, lead: bool) -> None:
    """Warn on one rank where the random states in a folder are not those of as many ranks."""
    matches = (_RANDOM_STATES.fullmatch(path.name) for path in folder.iterdir())
    found = len([match for match in matches if match]) or int((folder / "rng_state.pth").is_file())
    if lead and found != world:
        logger.warning(
            "Resuming from %s: it has the random states of %d ranks, this run has %d ranks; what a rank finds no state "
            "for (dropout, shuffling) begins anew.",
            folder,
            found,
            world,
        )


@contextmanager
def kept_by_engine(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Hide the schedulers and the scaler that have no file in the folder from accelerate's loading, then load them."""
    several = len(accelerator._models) > 1
    kept = [look(folder, number if several else None) for number in range(len(accelerator._models))]
    schedulers, scaler = accelerator._schedulers, accelerator.scaler
    hidden: dict[int, Any] = {}
    for number in range(len(schedulers)):
        if not (folder / of_model("scheduler", number, ".bin")).is_file():
            hidden[number] = _scheduler_of(kept, number)
            refuse_scheduler(schedulers[number], hidden[number], folder)
    if hidden and len(hidden) < len(schedulers):
        raise ValueError(
            f"nothing was loaded: {folder} has files of {len(schedulers) - len(hidden)} schedulers, the script "
            f"prepared {len(schedulers)}."
        )
    own_scaler = scaler is not None and not (folder / "scaler.pt").is_file()
    accelerator._schedulers = [] if hidden else schedulers
    accelerator.scaler = None if own_scaler else scaler
    try:
        yield
    finally:
        accelerator._schedulers, accelerator.scaler = schedulers, scaler
    for number, state in hidden.items():
        put_scheduler(schedulers[number], state)
    if own_scaler and kept[0].scaler:
        scaler.load_state_dict(kept[0].scaler)
    say_random_states(folder, accelerator.num_processes, accelerator.is_main_process)


def _scheduler_of(kept: list[Kept], number: int) -> Any:
    """Return the state of a scheduler: that of the model of its number, or by number where there is one model."""
    if len(kept) > 1:
        return kept[number].scheduler if number < len(kept) else None
    states = kept[0].scheduler
    states = states if isinstance(states, list) else [states]
    return states[number] if number < len(states) else None


def trainer_scheduler(path: Path, kept: Kept) -> Any:
    """Return the state of the Trainer's scheduler: from its file, or as the engine kept it."""
    return torch.load(path, weights_only=True) if path.is_file() else kept.scheduler
