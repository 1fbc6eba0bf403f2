"""Which of a Trainer's checkpoints `resume_from_checkpoint=True` takes.

Note [A Trainer's last file]
The Trainer writes `trainer_state.json` after all other files of a checkpoint, so one without it was not finished. It is
removed first where a checkpoint is written over an older one of its name. Files of weights and optimizers are looked at
too, for a disk that lost their ends.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

logger = logging.getLogger("ourshard")

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def _save_checkpoint(method: Callable[..., Any], trainer: Any, model: Any, trial: Any) -> None:
    """Make an older checkpoint of the same step an unfinished one before the first file is written over."""
    if trainer.args.should_save:
        step = trainer.state.global_step
        Path(trainer._get_output_dir(trial=trial), f"checkpoint-{step}", STATE).unlink(missing_ok=True)
    method(trainer, model, trial)


def newest_complete(folder: str) -> str | None:
    """Return the newest complete checkpoint in a Trainer's folder, and log each newer one with what it lacks."""
    numbered = [(int(match[1]), path) for path in Path(folder).iterdir() if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(numbered, reverse=True):
        problem = _problem(path)
        if problem is None:
            return str(path)
        logger.warning("resume_from_checkpoint: skipped %s: %s", path, problem)
    return None


def _problem(path: Path) -> str | None:
    if not (path / STATE).is_file():
        return f"it has no {STATE}, which is written last"
    try:
        json.loads((path / STATE).read_text(encoding="utf-8"))
    except ValueError:
        return f"{STATE} is cut off or damaged"
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
