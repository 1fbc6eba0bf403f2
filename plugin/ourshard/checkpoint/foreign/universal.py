"""Universal checkpoints of DeepSpeed: a folder for each parameter, made by ds_to_universal from stages 1 and 2, or
from 3.

From stages 1 and 2 a file holds {'param': tensor of the whole shape}, and each parameter has its step. From stage 3
it holds a flat tensor; shapes are in the copies of the model states, steps in zero/optimizer_state.pt. Names that had
no optimizer state (tied, frozen, buffers) may be there too, widened from 16 bit; the model states' own are taken
instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..source import CheckpointError
from .classes import PickledTensor
from .deepspeed import Shapes, add_engine_values, add_module, add_outer_files, add_partitioned_module
from .deepspeed_files import UNIVERSAL_FOLDER, ModelStates, model_files, tag_folder
from .draft import Draft, ForeignSource
from .plaindata import materialize
from .stored import FlatTensor, Readable, Run
from .torchfile import TorchFile

LATEST = "latest_universal"
OPTIMIZER_FILE = "optimizer_state.pt"
WEIGHT = "fp32"


class UniversalSource(ForeignSource):
    """One tag of a universal checkpoint."""

    format: ClassVar[str] = "deepspeed-universal"
    looks_for: ClassVar[str] = (
        "latest_universal, and zero/NAME/fp32.pt in the folder that it names (DeepSpeed universal)"
    )

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder of the tag, for the folder around it or itself."""
        return tag_folder(path, LATEST, universal=True)

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None) -> None:
        super().__init__(path, parameter_order)
        models, draft = [ModelStates.open(file) for file in model_files(path)], Draft()
        add_engine_values(draft, models[0])
        shapes = models[0].shapes
        merged = {name: shape for group in shapes for name, shape in group.items()}
        folders = {folder.name: folder for folder in sorted((path / UNIVERSAL_FOLDER).iterdir()) if folder.is_dir()}
        masters = _add_parameters(draft, folders, merged)
        if _is_partitioned(models[0], merged):
            draft.stage = 3
            add_partitioned_module(draft, models, masters)
        else:
            draft.masters.update(masters)
            add_module(draft, models[0])
        _add_aliases(draft, folders, merged)
        _add_optimizer(draft, path / UNIVERSAL_FOLDER / OPTIMIZER_FILE, shapes)
        add_outer_files(draft, path, LATEST)
        self.publish(draft)


def _is_partitioned(states: ModelStates, shapes: Shapes) -> bool:
    """Tell whether the module's own tensors are placeholders, as in stage 3."""
    return any(tensor.numel == 0 and math.prod(shapes.get(name, (0,))) for name, tensor in states.module.items())


def _add_parameters(draft: Draft, folders: Mapping[str, Path], shapes: Shapes) -> dict[str, Readable]:
    """Add the optimizer's state of each trained parameter, and return their fp32 weights."""
    masters = {}
    for name, shape in shapes.items():
        folder = folders.get(name)
        if folder is None or not (folder / f"{WEIGHT}.pt").is_file():
            raise CheckpointError(f"{folder or name}: {WEIGHT}.pt of {name} is missing")
        for path in sorted(folder.glob("*.pt")):
            value = _read(path, shape)
            if path.stem == WEIGHT:
                if not isinstance(value, Readable):
                    raise CheckpointError(f"{path}: holds no tensor")
                masters[name] = value
            else:
                draft.state.setdefault(name, {})[path.stem] = value
    return masters


def _read(path: Path, shape: tuple[int, ...]) -> Any:
    """Return the tensor or value in a file; a flat tensor of the right length gets its shape."""
    file = TorchFile(path)
    content = file.load()
    if isinstance(content, dict) and "param" in content:
        content = content["param"]
    if not isinstance(content, PickledTensor):
        return materialize(file, content)
    stored = file.stored(content)
    if path.stem != "step" and stored.shape != shape and stored.shape == (math.prod(shape),):
        return FlatTensor(shape, [Run(0, stored.shape[0], stored, 0)], str(path))
    return stored


def _add_aliases(draft: Draft, folders: Mapping[str, Path], shapes: Shapes) -> None:
    """Note aliases that were written with less precision than their owners; the owner's values are the ones taken."""
    for alias, owner in (draft.ties or {}).items():
        folder = folders.get(alias)
        if folder is not None and owner in shapes and (folder / f"{WEIGHT}.pt").is_file():
            value = _read(folder / f"{WEIGHT}.pt", shapes[owner])
            if isinstance(value, Readable):
                draft.model[alias] = value


def _add_optimizer(draft: Draft, path: Path, shapes: Sequence[Shapes]) -> None:
    """Add the groups by name, and from stage 3 the steps."""
    if not path.is_file():
        draft.losses.append(f"options of the optimizer's groups: {path.name} is missing")
        draft.groups = [{"params": list(group)} for group in shapes]
        return
    file = TorchFile(path)
    content = file.load()
    inner = content.get("optimizer_state_dict", content) if isinstance(content, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise CheckpointError(f"{path}: holds no groups of an optimizer")
    draft.groups = []
    for options in materialize(file, inner["param_groups"]):
        numbers = options.get("params") if isinstance(options, dict) else None
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < len(shapes) for n in numbers):
            raise CheckpointError(f"{path}: a group of the optimizer does not list its flat groups")
        draft.groups.append({**options, "params": [name for number in numbers for name in shapes[number]]})
    state = inner.get("state")
    for index, group in enumerate(shapes):
        values = state.get(index) if isinstance(state, dict) else None
        step = values.get("step") if isinstance(values, dict) else None
        for name in group if step is not None else ():
            own = draft.state.setdefault(name, {})
            own.setdefault("step", file.stored(step) if isinstance(step, PickledTensor) else step)
