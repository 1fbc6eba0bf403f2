"""Which of a Trainer's checkpoints `resume_from_checkpoint=True` takes.

Note [A Trainer's last file]
The Trainer writes `trainer_state.json` after all other files of a checkpoint, so one without it was not finished. It is
removed first where a checkpoint is written over an older one of its name. Files of weights and optimizers are looked at
too, for a disk that lost their ends. One with rows is complete when its manifest is there: `trainer_checkpoint.py`.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ourshard.checkpoint import commit
from ourshard.checkpoint.commit import Newest
from ourshard.integrations import trainer_checkpoint
from ourshard.integrations.saving import log_skipped, sharded_folder
from ourshard.integrations.trainer_checkpoint import STATE

_NAME = re.compile(r"checkpoint-(\d+)")


def _save_checkpoint(method: Callable[..., Any], trainer: Any, model: Any, trial: Any) -> None:
    """Make an older checkpoint of the same step an unfinished one before the first file is written over."""
    engine = trainer_checkpoint.engine_for(trainer)
    if engine is not None:
        trainer_checkpoint.save(method, trainer, engine, model, trial)
        return
    if trainer.args.should_save:
        folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
        (folder / STATE).unlink(missing_ok=True)
        commit.abandon(sharded_folder(folder, 0))
    method(trainer, model, trial)


def newest_complete(folder: str) -> str | None:
    """Return the newest complete checkpoint in a Trainer's folder, and log each newer one with what it lacks."""
    numbered = [(int(match[1]), path) for path in Path(folder).iterdir() if (match := _NAME.fullmatch(path.name))]
    skipped: list[str] = []
    for _, path in sorted(numbered, reverse=True):
        problem = _problem(path)
        if problem is None:
            return log_skipped("resume_from_checkpoint", Newest(path, tuple(skipped)))
        skipped.append(f"{path}: {problem}")
    return log_skipped("resume_from_checkpoint", Newest(None, tuple(skipped)))


def _problem(path: Path) -> str | None:
    if not (path / STATE).is_file():
        return f"it has no {STATE}, which is written last"
    try:
        json.loads((path / STATE).read_text(encoding="utf-8"))
    except ValueError:
        return f"{STATE} is cut off or damaged"
    if trainer_checkpoint.is_sharded(path):
        return trainer_checkpoint.problem_of(path)
    unfinished = commit.temporary_of(sharded_folder(path, 0)).exists()
    return "the save was not finished" if unfinished else _problem_of_files(path)


def _problem_of_files(path: Path) -> str | None:
    """Return which file of a checkpoint of whole files is cut off, if any."""
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            return f"{file.name}: {error}"
    for file in sorted(path.glob("*.pt")):
        if not zipfile.is_zipfile(file):
            return f"{file.name} is cut off or damaged"
    return None
