"""FSDP checkpoints of accelerate and the Trainer that are not DCP: whole state in one file, or one pickle a rank.

FULL_STATE_DICT: `pytorch_model_fsdp.bin` and `optimizer.bin`, named parameters. `use_dcp=False`:
`pytorch_model_fsdp_0_rank{r}.bin` and `optimizer_0_rank{r}.bin`, with a DTensor (FSDP2) or ShardedTensor (FSDP1) for
each parameter, of which a file holds its rank's part. LOCAL_STATE_DICT (FSDP1) holds flat parameters without the
shapes of what is in them, so it cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ourshard.runtime.wording import counted
from ourshard.runtime.wrap import canonical

from ..numbered import Models, numbered, of_model
from ..source import CheckpointError
from .classes import PickledTensor
from .dcp_source import add_adapter_names
from .draft import Draft, ForeignSource
from .integer_keys import Order, name_integer_keys, order_of_model
from .local_parts import RankFiles
from .names import canonical_keys
from .plaindata import materialize
from .runfiles import add_run_files
from .ties import find_ties
from .torchfile import TorchFile
from .unpickle import Record
from .weights import torch_tensors

MODEL_FILE = "pytorch_model_fsdp.bin"
OPTIMIZER_FILE = "optimizer.bin"
_MODEL_STEM, _OPTIMIZER_STEM = "pytorch_model_fsdp", "optimizer"
_FULL_FILE = rf"{_MODEL_STEM}(?:_(?P<n>\d+))?\.bin"
_RANK_FILE = rf"{_MODEL_STEM}(?:_(?P<n>\d+))?_rank\d+\.bin"


class FsdpFullSource(ForeignSource):
    """A folder with whole state in one file each."""

    format: ClassVar[str] = "fsdp-full"
    looks_for: ClassVar[str] = f"{MODEL_FILE} (FSDP of accelerate, FULL_STATE_DICT)"

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder of the file."""
        folder = path.parent if re.fullmatch(_FULL_FILE, path.name) else path
        return folder if cls.models_in(folder) else None

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of the models' files."""
        return numbered(found, _FULL_FILE)

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        draft = Draft()
        name, optimizer = of_model(_MODEL_STEM, model, ".bin"), of_model(_OPTIMIZER_STEM, model, ".bin")
        tensors, shared, _ = torch_tensors(path / name)
        draft.model = canonical_keys(tensors, name, None)
        if (path / optimizer).is_file():
            file = TorchFile(path / optimizer)
            order = order_of_model(draft, parameter_order, "the order of the model's tensors")
            add_optimizer(draft, optimizer_of(file), order)
        add_adapter_names(draft)
        add_run_files(draft, path, model, len(self.models_in(path)))
        draft.ties = {**find_ties(draft.model, draft.trained), **shared}
        self.publish(draft)


def optimizer_of(file: TorchFile) -> dict[str, Any]:
    """Return the state_dict of an optimizer in a file: tensors as readers, all else as plain data."""
    content = file.load()
    if isinstance(content, dict) and isinstance(content.get("optimizer_state_dict"), dict):
        content = content["optimizer_state_dict"]
    return optimizer_of_content(file, content)


def optimizer_of_content(file: TorchFile, content: Any) -> dict[str, Any]:
    """Return the same of an object that was loaded from the file."""
    if not isinstance(content, dict) or not isinstance(content.get("state"), dict) or "param_groups" not in content:
        raise CheckpointError(f"{file.where}: holds no state_dict of an optimizer")
    state = {}
    for owner, values in content["state"].items():
        if not isinstance(values, dict):
            raise CheckpointError(f"{file.where}: the state of {owner!r} is no dict")
        state[owner] = {str(key): _value(file, value) for key, value in values.items()}
    groups = materialize(file, content["param_groups"])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{file.where}: the optimizer's groups are no list of dicts")
    return {"state": state, "param_groups": groups}


def _value(file: TorchFile, value: Any) -> Any:
    if isinstance(value, PickledTensor):
        return file.stored(value)
    if isinstance(value, Record):
        raise CheckpointError(
            f"{file.where}: holds {value.kind} objects, one part a rank, where whole tensors were expected"
        )
    return materialize(file, value)


def add_optimizer(draft: Draft, optimizer: Mapping[str, Any], order: Order) -> None:
    """Put an optimizer's state into the draft, by its names, or by `order` if it has numbers."""
    state, groups = optimizer["state"], optimizer["param_groups"]
    listed = [name for group in groups for name in group.get("params", ())]
    if all(isinstance(name, str) for name in (*state, *listed)):
        draft.state = {canonical(name): values for name, values in state.items()}
        draft.groups = [{**group, "params": [canonical(name) for name in group.get("params", ())]} for group in groups]
    else:
        name_integer_keys(draft, optimizer, [order])


class FsdpRankSource(ForeignSource):
    """A folder with a pickle of each rank."""

    format: ClassVar[str] = "fsdp-rank"
    looks_for: ClassVar[str] = "pytorch_model_fsdp_0_rank0.bin (FSDP of accelerate, use_dcp=False)"

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder of the files."""
        folder = path.parent if re.fullmatch(_RANK_FILE, path.name) else path
        return folder if cls.models_in(folder) else None

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of the models' files."""
        return numbered(found, _RANK_FILE)

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        draft = Draft()
        files = _rank_files(path, f"{_MODEL_STEM}_{model}")
        optimizers = _rank_files(path, f"{_OPTIMIZER_STEM}_{model}")
        if not files or _is_local(files):
            raise CheckpointError(
                f"{path}: LOCAL_STATE_DICT of FSDP1 holds flat parameters without the shapes of what is in them; "
                "load it with the program that wrote it and save SHARDED_STATE_DICT"
            )
        draft.world_size = len(files)
        draft.model = canonical_keys(RankFiles(files).tensors(), str(path), None)
        if optimizers:
            if len(optimizers) != len(files):
                raise CheckpointError(
                    f"{path}: {counted(len(files), 'file')} of the model and {len(optimizers)} of the optimizer"
                )
            optimizer = RankFiles(optimizers).optimizer()
            order = order_of_model(draft, parameter_order, "the order of the model's tensors")
            add_optimizer(draft, optimizer, order)
        add_adapter_names(draft)
        add_run_files(draft, path, model, len(self.models_in(path)))
        self.publish(draft)


def _is_local(files: Sequence[Path]) -> bool:
    """Tell whether these are of LOCAL_STATE_DICT, which names its second model as use_dcp=False does.

    Its optimizers are no files of ranks, and it names its first model without a number.
    """
    folder = files[0].parent
    return any(folder.glob(f"{_MODEL_STEM}_rank*.bin")) or not any(folder.glob(f"{_MODEL_STEM}_0_rank*.bin"))


def _rank_files(folder: Path, stem: str) -> list[Path]:
    """Return the files of all ranks in order; raise if one between them is missing."""
    pattern = re.compile(rf"{stem}_rank(\d+)\.bin")
    found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    missing = [rank for rank in range(max(found, default=-1) + 1) if rank not in found]
    if missing:
        raise CheckpointError(
            f"{folder}: the file of rank {missing[0]} is missing ({len(found)} of {max(found) + 1} are there)"
        )
    return [found[rank] for rank in sorted(found)]
