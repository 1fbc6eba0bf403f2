"""The files that accelerate and the Trainer put beside weights and optimizer: scheduler, scaler, trainer state."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ourshard.runtime.wording import counted

from ..companions import companions
from ..safetensors_file import without_duplicates
from ..source import CheckpointError
from .draft import Draft
from .plaindata import read_plain

_MAX_JSON = 256 << 20
_SCHEDULER = re.compile(r"scheduler(?:_(\d+))?\.bin|scheduler\.pt")
# name of a file -> what is not carried
_LEFT = (
    (re.compile(r"(random_states_\d+\.pkl|rng_state(_\d+)?\.pth)"), "random states of each rank"),
    (re.compile(r"(sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin)"), "positions in the data"),
    (re.compile(r"custom_checkpoint_\d+\.pkl"), "objects registered with register_for_checkpointing"),
    (re.compile(r"training_args\.bin"), "training_args.bin, a pickle of the Trainer's own classes"),
)


def add_run_files(draft: Draft, folder: Path, model: int = 0, models: int = 1) -> None:
    """Add what lies in the folder of a run, and say what of it is not carried.

    Of as many schedulers as `models`, that of this model is taken; else all of them.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    numbered = {int(match[1] or 0): name for name in names if (match := _SCHEDULER.fullmatch(name))}
    if len(numbered) == models > 1 and model in numbered:
        numbered = {0: numbered[model]}
    states = [read_plain(folder / numbered[number]) for number in sorted(numbered)]
    if states:
        draft.scheduler = states[0] if len(states) == 1 else states
    if "scaler.pt" in names:
        draft.scaler = read_plain(folder / "scaler.pt")
    draft.files.update(companions(folder))
    for pattern, what in _LEFT:
        count = sum(1 for name in names if pattern.fullmatch(name))
        if count:
            draft.beside.append(f"{what} ({counted(count, 'file')})")
    if "trainer_state.json" in names and draft.step is None:
        step = read_json(folder / "trainer_state.json").get("global_step")
        draft.step = step if type(step) is int and step >= 0 else None
    if "adapter_config.json" in names:
        draft.adapter_config = read_json(folder / "adapter_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise CheckpointError naming the file."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ValueError(f"it has more than {_MAX_JSON} bytes")
        value = json.loads(path.read_bytes(), object_pairs_hook=without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, an object was expected")
    return value
