"""Write universal checkpoints that DeepSpeed resumes from at any stage and number of ranks.

ds_to_universal makes one kind for stages 1 and 2 and another for stage 3. This folder serves both: whole shapes and a
step for each parameter (stages 1 and 2), and zero/optimizer_state.pt with the steps of groups (stage 3), under the
names of model states that either looks for. Trained weights lie in zero/ only; the model states hold what is not
trained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..huggingface_sink import write_companions
from ..sink import Sink
from ..source import BUFFER, PARAM, Source, TensorInfo, TensorKey
from ..torch_archive import Archive
from ..workspace import Workspace
from .dcp_sink import DcpSink, save_small
from .deepspeed_files import ENGINE_KEYS, UNIVERSAL_FOLDER
from .universal import LATEST, OPTIMIZER_FILE, WEIGHT

_MOMENTS = ("exp_avg", "exp_avg_sq")
_VERSION = "0.16.0"  # of DeepSpeed, for sources that have none; it refuses checkpoints of old versions
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class UniversalSink(Sink):
    """Writer of `global_stepN_universal/`."""

    format: ClassVar[str] = "deepspeed-universal"
    summary: ClassVar[str] = "universal checkpoint that DeepSpeed loads at any ZeRO stage (checkpoint.load_universal)"
    refused_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_shard_size", "world_size"), "each parameter has a folder"
    )

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold weights, buffers and the optimizer's state."""
        return DcpSink.can_hold(kind)

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Name what has no place, or what DeepSpeed does not look at."""
        lost = list(super().losses(source))
        description = source.description
        untrained = len(_untrained(source))
        if untrained:
            lost.append(
                f"{untrained} frozen parameters and buffers: written, but DeepSpeed does not load them from here"
            )
        if description.scaler:
            lost.append("the state of the gradient scaler: DeepSpeed starts a new one")
        filled = sum(1 for _ in _missing_moments(source))
        if filled:
            lost.append(f"that {filled} moments do not exist yet: DeepSpeed needs them, zeros are written")
        reserved = sorted(ENGINE_KEYS & description.client_state.keys())
        if reserved:
            lost.append(f"{', '.join(reserved)} of the client state: DeepSpeed has keys of these names")
        return tuple(lost)

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write a folder for each trained parameter, then what is common to all, then the pointer to it."""
        if not source.description.param_groups:
            raise ValueError(
                f"{source.path} has no parameter groups of an optimizer, without which DeepSpeed cannot resume; "
                "for weights alone convert to safetensors"
            )
        tag = f"global_step{source.description.step or 0}_universal"
        filled = _Filled(source)
        keys: dict[str, list[TensorKey]] = {name: [] for name in _trained(source)}
        for key in filled.tensors:
            if key.name in keys and key.kind not in (BUFFER, "step"):
                keys[key.name].append(key)

        def write_one(name: str) -> None:
            _write_parameter(filled, workspace, f"{tag}/{UNIVERSAL_FOLDER}/{name}", name, keys[name])

        workspace.map(write_one, keys)
        _write_common(source, workspace, tag)
        write_companions(workspace, source, [info for key, info in source.tensors.items() if key.kind == PARAM])
        workspace.write_bytes(LATEST, tag.encode())


def _trained(source: Source) -> list[str]:
    return [name for group in source.description.param_groups for name in group["params"]]


def _untrained(source: Source) -> list[TensorKey]:
    trained = _trained(source)
    return [key for key in source.tensors if key.kind == BUFFER or (key.kind == PARAM and key.name not in trained)]


def _missing_moments(source: Source) -> list[TensorKey]:
    """Return the moments of Adam that trained parameters lack while others have them."""
    kinds = {key.kind for key in source.tensors if key.is_state} & set(_MOMENTS)
    keys = (TensorKey(kind, name) for name in _trained(source) for kind in sorted(kinds))
    return [key for key in keys if key not in source.tensors]


class _Filled(Source):
    """A source with zeros for missing moments."""

    format: ClassVar[str] = ""
    looks_for: ClassVar[str] = ""

    def __init__(self, base: Source) -> None:
        super().__init__(base.path)
        self.base = base
        self.description = base.description
        zeros = {}
        for key in _missing_moments(base):
            zeros[key] = TensorInfo(key, base.tensors[TensorKey(PARAM, key.name)].shape, torch.float32)
        self.tensors = {**base.tensors, **zeros}

    @classmethod
    def find(cls, path: Any) -> None:
        """Find nothing: it is made, not opened."""
        return None

    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return rows of the tensor, or zeros."""
        if key in self.base.tensors:
            return self.base.read(key, start_row, stop_row)
        info = self.tensors[key]
        start, stop = info.rows_within(start_row, stop_row)
        return torch.zeros(info.shape_of(start, stop), dtype=info.dtype, device="cpu")


def _write_parameter(source: _Filled, workspace: Workspace, folder: str, name: str, keys: Sequence[TensorKey]) -> None:
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} cannot be the name of a folder, as DeepSpeed needs it")
    for key in keys:
        archive = Archive(source)
        value = {"param": archive.tensor(key), "cat_dim": 0}
        archive.write(workspace, f"{folder}/{WEIGHT if key.kind == PARAM else key.kind}.pt", value)
    save_small(workspace, f"{folder}/step.pt", _step(source, name))


def _step(source: Source, name: str) -> torch.Tensor:
    """Return the step of a parameter, or of the checkpoint if it has none of its own."""
    key = TensorKey("step", name)
    if key in source.tensors:
        return source.read(key)
    own = source.description.param_state.get(name, {}).get("step", source.description.step or 0)
    return torch.tensor(float(own), device="cpu")


def _write_common(source: Source, workspace: Workspace, tag: str) -> None:
    """Write the options of the groups, and the model states for stages 1 and 2 and for stage 3."""
    description = source.description
    version = description.versions.get("deepspeed", _VERSION)
    members = [list(group["params"]) for group in description.param_groups]
    options = [{**group, "params": [index]} for index, group in enumerate(description.param_groups)]
    steps = {index: {"step": _step(source, names[0])} for index, names in enumerate(members) if names}
    content = {
        "dynamic_loss_scale": False,
        "overflow": False,
        "ds_version": version,
        "param_groups": options,
        "optimizer_state_dict": {"state": steps, "param_groups": options},
    }
    archive = Archive(source)
    archive.write(workspace, f"{tag}/{UNIVERSAL_FOLDER}/{OPTIMIZER_FILE}", archive.plain(content))
    untrained = _untrained(source)
    for file, held in zip(_MODEL_FILES, (untrained, [key for key in untrained if key.kind == BUFFER]), strict=True):
        archive = Archive(source)
        archive.write(workspace, f"{tag}/{file}", _model_states(source, archive, members, held, version))


def _model_states(
    source: Source, archive: Archive, members: Sequence[Sequence[str]], held: Sequence[TensorKey], version: str
) -> dict[str, Any]:
    """Return the model states. Tensors that are not `held` are placeholders without elements, as stage 3 has them."""
    description = source.description
    world = description.world_size or 1
    module: dict[str, Any] = {}
    for key, info in source.tensors.items():
        if key in held:
            module[key.name] = archive.tensor(key)
        elif key.kind in (PARAM, BUFFER):
            own = description.own_dtypes.get(key.name, info.dtype)
            module[key.name] = archive.plain(torch.empty(0, dtype=own, device="cpu"))
    return {
        "module": module,
        "buffer_names": [key.name for key in source.tensors if key.kind == BUFFER],
        "optimizer": None,
        "param_shapes": [_shapes(source, names) for names in members],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(description.ties),
        "lr_scheduler": archive.plain(description.scheduler),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": description.step or 0,
        "global_samples": 0,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": version,
        **archive.plain({key: value for key, value in description.client_state.items() if key not in ENGINE_KEYS}),
    }


def _shapes(source: Source, names: Sequence[str]) -> Mapping[str, torch.Size]:
    return OrderedDict((name, torch.Size(source.tensors[TensorKey(PARAM, name)].shape)) for name in names)
