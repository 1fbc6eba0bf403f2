"""Several models in one folder: accelerate's `save_state` numbers what belongs to each, often not the first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

Models = Mapping[int, tuple[str, ...]]  # number -> names of its files and folders


def numbered(folder: Path, pattern: str) -> Models:
    """Return the models whose names fit the pattern; in it `(?P<n>...)` is the number, which may be absent for 0."""
    if not folder.is_dir():
        return {}
    compiled = re.compile(pattern)
    found: dict[int, tuple[str, ...]] = {}
    for path in sorted(folder.iterdir()):
        match = compiled.fullmatch(path.name)
        if match:
            number = int(match["n"] or 0)
            found[number] = (*found.get(number, ()), path.name)
    return found


def choose(path: Path, models: Models, model: int | None) -> int | None:
    """Return which model to open: the one that is asked for, or that `path` names, or the only one; None: no choice.

    Raises ValueError if there are several and none is asked for, or if there is no model of this number.
    """
    if model is not None and model not in (models or {0: ()}):
        there = f"models {', '.join(map(str, sorted(models)))}" if len(models) > 1 else "one model"
        raise ValueError(f"{path} holds {there}: there is no model {model}")
    named = [number for number, names in models.items() if path.name in names]
    if model is None and models.keys() - {0} and len(named) != 1:
        listed = "; ".join(f"{number}: {', '.join(names[:3])}" for number, names in sorted(models.items()))
        raise ValueError(f"{path} holds models by number ({listed}): choose one (--model, model=)")
    if model is not None:
        return model if models else None
    return next(iter(named or models), None)


def of_model(stem: str, number: int, ending: str = "") -> str:
    """Return a name as accelerate numbers it: `optimizer.bin`, `optimizer_1.bin`."""
    return f"{stem}_{number}{ending}" if number else f"{stem}{ending}"
