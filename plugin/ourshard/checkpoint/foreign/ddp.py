"""Checkpoints without sharding (one process, DDP) of accelerate and the Trainer, and adapters of PEFT.

Weights lie as Hugging Face libraries save them; the optimizer beside them (`optimizer.bin` of accelerate,
`optimizer.pt` of the Trainer) numbers its parameters; `ourshard_optimizer.bin`, of a whole `save_state` under ourshard,
names them. Weights without an optimizer are read by the reader of safetensors, but for adapters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..huggingface import tie_by_config
from ..numbered import Models, numbered, of_model
from ..source import ADAPTER_ALONE, MASTERS, OURS, WHOLE_LOCAL, WHOLE_OPTIMIZER, CheckpointError
from .adapters import with_adapter_name
from .classes import PickledTensor
from .draft import Draft, ForeignSource
from .fsdp_files import optimizer_of
from .integer_keys import Order, name_integer_keys
from .names import canonical_keys
from .orders import orders
from .runfiles import add_run_files
from .torchfile import TorchFile
from .weights import find_weights, read_weights

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_NAMED = rf"{WHOLE_OPTIMIZER}(?:_(?P<n>\d+))?\.bin"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = ("adapter_model",)
_MODEL = ("model", "pytorch_model")
_OF_ONE_LAYOUT = "the optimizer's state: only the ranks and the layout that saved it can read it"


def _weights_path(folder: Path, model: int = 0) -> Path | None:
    if (folder / _ADAPTER_CONFIG).is_file():
        adapter = find_weights(folder, _ADAPTER)
        if adapter is not None:
            return adapter
    return find_weights(folder, _MODEL, model)


def models_of_accelerate(folder: Path) -> Models:
    """Return the models that `save_state` put whole into a folder; {} if it is of an adapter, or of Transformers."""
    adapter = (folder / _ADAPTER_CONFIG).is_file() and find_weights(folder, _ADAPTER) is not None
    return {} if adapter else numbered(folder, r"(?:model|pytorch_model)(?:_(?P<n>\d+))?\.(?:safetensors|bin)")


class DdpSource(ForeignSource):
    """Weights with a numbered optimizer."""

    format: ClassVar[str] = "ddp"
    looks_for: ClassVar[str] = (
        "optimizer.pt or (ourshard_)optimizer.bin beside model.safetensors, pytorch_model.bin or an adapter"
    )

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder if it has an optimizer and weights."""
        is_file = path.name in _OPTIMIZERS or re.fullmatch(_NAMED, path.name)
        folder = path.parent if is_file and path.is_file() else path
        if not any((folder / name).is_file() for name in _OPTIMIZERS) and not numbered(folder, _NAMED):
            return None
        return folder if _weights_path(folder) or models_of_accelerate(folder) else None

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of the models' files."""
        return models_of_accelerate(found)

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        draft = Draft()
        weights_path = _weights_path(path, model)
        if weights_path is None:
            raise CheckpointError(f"{path}: has no weights")
        weights = read_weights(weights_path)
        add_run_files(draft, path, model, len(self.models_in(path)))
        named, optimizer = numbered(path, _NAMED), _optimizer_path(path, model)
        known = None if named else parameter_order or ()  # ourshard, which names them, writes no marks
        draft.model = canonical_keys(weights.tensors, str(weights_path), known)
        draft.ties = dict(weights.ties)
        if weights_path.name.startswith(_ADAPTER):
            _name_adapter(draft)
        else:
            tie_by_config(draft)
        if named:
            _add_named(draft, [path / name for names in named.values() for name in names], model)
        elif optimizer is not None:
            found = list(orders(path, list(draft.model), parameter_order))
            if weights.in_model_order and parameter_order is None:
                found.insert(0, Order(tuple(draft.model), f"the order in {weights_path.name}"))
            file = TorchFile(optimizer)
            content = file.load()
            _add_masters(draft, file, content, model)
            if _is_of_one_layout(content):
                draft.losses.append(_OF_ONE_LAYOUT)
            else:
                name_integer_keys(draft, optimizer_of(file), found)
        draft.losses += _of_no_model(path, self.models_in(path))
        self.publish(draft)


def _is_of_one_layout(content: Any) -> bool:
    """Tell whether a Trainer under ourshard wrote it: Note [Local state] in local_state.py."""
    return isinstance(content, dict) and content.keys() == {OURS}


def _add_named(draft: Draft, paths: Sequence[Path], model: int) -> None:
    """Read what optimizers have of a model; its number is before the names of its parameters."""
    own, groups = f"{model}/", []
    for file in map(TorchFile, paths):
        content = file.load()
        _add_masters(draft, file, content, model)
        if isinstance(content, dict) and content.get(WHOLE_LOCAL):
            draft.losses.append(_OF_ONE_LAYOUT)
            continue
        optimizer = optimizer_of(file)
        state = {key.removeprefix(own): values for key, values in optimizer["state"].items() if key.startswith(own)}
        draft.state.update(state)
        for group in optimizer["param_groups"]:
            names = [key.removeprefix(own) for key in group["params"] if key.startswith(own)]
            groups += [{**group, "params": names}] if names else []
    draft.groups = groups or None


def _add_masters(draft: Draft, file: TorchFile, content: Any, model: int) -> None:
    """Read the masters that ourshard put beside the state, where the weights' file rounds them."""
    for key, value in content.get(MASTERS, {}).items() if isinstance(content, dict) else ():
        number, _, name = str(key).partition("/")
        if number == str(model) and name in draft.model and isinstance(value, PickledTensor):
            draft.masters[name] = file.stored(value)


def _optimizer_path(folder: Path, model: int) -> Path | None:
    names = _OPTIMIZERS if model == 0 else (of_model("optimizer", model, ".bin"),)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _of_no_model(folder: Path, models: Models) -> list[str]:
    """Say which optimizers are left out: a model has one, of its number."""
    others = numbered(folder, r"optimizer_(?P<n>\d+)\.bin").keys() - models.keys()
    return [f"optimizer_{number}.bin: an optimizer, there is no model of its number" for number in sorted(others)]


class PeftSource(ForeignSource):
    """An adapter of PEFT without an optimizer."""

    format: ClassVar[str] = "peft"
    looks_for: ClassVar[str] = "adapter_config.json and adapter_model.safetensors (or .bin)"

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder of an adapter."""
        folder = path.parent if path.name.startswith(_ADAPTER) and path.is_file() else path
        if not (folder / _ADAPTER_CONFIG).is_file():
            return None
        return folder if find_weights(folder, _ADAPTER) else None

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None) -> None:
        super().__init__(path, parameter_order)
        draft = Draft()
        weights_path = find_weights(path, _ADAPTER)
        if weights_path is None:
            raise CheckpointError(f"{path}: has no adapter_model file")
        weights = read_weights(weights_path)
        add_run_files(draft, path)
        draft.model, draft.ties = dict(weights.tensors), dict(weights.ties)
        _name_adapter(draft)
        self.publish(draft)


def _name_adapter(draft: Draft) -> None:
    """Give an adapter's tensors their names within the PEFT model."""
    draft.model = {with_adapter_name(name, draft.adapter_config): reader for name, reader in draft.model.items()}
    draft.oddities.append(ADAPTER_ALONE)
