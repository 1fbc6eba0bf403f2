"""The files of a DeepSpeed checkpoint: which there are, what they hold beside tensors, and what kinds are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ourshard.runtime.wording import counted

from ..io import inside
from ..source import CheckpointError
from .classes import PickledTensor
from .plaindata import materialize
from .torchfile import TorchFile
from .unpickle import Record

LATEST = "latest"
UNIVERSAL_FOLDER = "zero"

_WHOLE_MODEL = "mp_rank_00_model_states.pt"
_RANK_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_REFUSED = (
    (re.compile(r"mp_rank_(?!00)\d+_model_states\.pt"), "tensor parallelism"),
    (re.compile(r"layer_\d+(-model_\d+)?-model_states\.pt"), "pipeline parallelism"),
    (re.compile(r"layer_.*expert_.*_model_states\.pt|expp_rank_\d+_.*"), "mixture of experts with expert parallelism"),
)
# What the engine writes at the top level of model states; all else is the user's client state.
ENGINE_KEYS = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info",
    )
)  # fmt: skip
_TAG = re.compile(r"[^/\\\0]+")
_MAX_TAG = 255  # bytes in the name of a folder


def tag_folder(path: Path, latest: str = LATEST, *, universal: bool = False) -> Path | None:
    """Return this folder if it is of one tag, else the one that `latest` here names, else the only one.

    None: there is none. The folder itself if it has several and `latest` names none of them; opening it says so.
    """
    if not path.is_dir():
        return None
    if has_model_states(path):
        return path if is_universal(path) == universal else None
    pointer = path / latest
    tag = pointer.read_text("utf-8", "replace").strip() if pointer.is_file() and pointer.stat().st_size < 1024 else ""
    is_name = _TAG.fullmatch(tag) and tag not in (".", "..") and len(tag.encode("utf-8", "replace")) <= _MAX_TAG
    if is_name and has_model_states(path / tag):
        return path / tag
    tags = [inner for inner in tags_of(path) if is_universal(inner) == universal]
    if not tags:
        return None
    return tags[0] if len(tags) == 1 and not pointer.exists() else path


def tags_of(path: Path) -> list[Path]:
    """Return the folders of tags in a folder."""
    return [inner for inner in sorted(path.iterdir()) if has_model_states(inner)]


def is_universal(folder: Path) -> bool:
    """Tell whether the folder of a tag is of the universal kind."""
    return (folder / UNIVERSAL_FOLDER).is_dir()


def has_model_states(folder: Path) -> bool:
    """Tell whether a folder holds model states."""
    if not folder.is_dir():
        return False
    return (folder / _WHOLE_MODEL).is_file() or any(_RANK_MODEL.fullmatch(path.name) for path in folder.iterdir())


@dataclass(slots=True)
class ModelStates:
    """One file of model states; `shapes` has one dict for each flat group, in the order of its elements."""

    file: TorchFile
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> ModelStates:
        """Read the pickle of a file."""
        file = TorchFile(path)
        content = file.load()
        if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
            raise CheckpointError(f"{path}: holds no model states of DeepSpeed")
        return cls(file, content)

    @property
    def module(self) -> dict[str, PickledTensor]:
        """Return the tensors of the module; extra state of modules, which is no tensor, is left out."""
        return {name: value for name, value in self.content["module"].items() if isinstance(value, PickledTensor)}

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return param_shapes; empty where the engine writes none (stage 0)."""
        groups = self.content.get("param_shapes")
        groups = [groups] if isinstance(groups, dict) else groups or []
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{self.file.where}: param_shapes is damaged")
        return [_checked_shapes(group, self.file.where) for group in groups]

    @property
    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of frozen parameters; empty if they were left out."""
        return _checked_shapes(self.content.get("frozen_param_shapes") or {}, self.file.where)

    @property
    def ties(self) -> dict[str, str]:
        """Return alias -> owner."""
        shared = self.content.get("shared_params") or {}
        if isinstance(shared, (list, tuple)):  # older versions: pairs
            shared = dict(shared)
        if not all(isinstance(alias, str) and isinstance(owner, str) for alias, owner in shared.items()):
            raise CheckpointError(f"{self.file.where}: shared_params is damaged")
        return dict(shared)

    def client_state(self) -> dict[str, Any]:
        """Return what the user's program put in."""
        client = {key: value for key, value in self.content.items() if key not in ENGINE_KEYS}
        return materialize(self.file, client)

    def plain(self, key: str) -> Any:
        """Return one of the engine's own values."""
        return materialize(self.file, self.content.get(key))


def _checked_shapes(group: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    for name, shape in group.items():
        if not isinstance(name, str) or not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise CheckpointError(f"{where}: {name!r} has the odd shape {shape!r:.60}")
    return dict(group)


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """The opened files of one tag: model states (one, or one a rank), and optimizer states by data-parallel rank."""

    models: list[ModelStates]
    optimizers: list[TorchFile]
    states: list[dict[str, Any]]  # `optimizer_state_dict` of each rank

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the zero_optimization section of the config."""
        config = self.models[0].content.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return zero if isinstance(zero, dict) else {}


def open_files(folder: Path) -> DeepSpeedFiles:
    """Open all files of a tag. Raises CheckpointError for missing ranks and for parallelism that is not read."""
    models = [ModelStates.open(path) for path in model_files(folder)]
    optimizers = [TorchFile(path) for path in _optimizer_files(folder)]
    files = DeepSpeedFiles(models, optimizers, [_optimizer_state(file) for file in optimizers])
    _refuse_sections(files, folder)
    world = models[0].content.get("dp_world_size")
    if optimizers and type(world) is int and world != len(optimizers):
        raise CheckpointError(
            f"{folder}: {counted(len(optimizers), 'file')} of optimizer states for {counted(world, 'rank')}; "
            "some are missing"
        )
    if len(models) > 1 and optimizers and len(models) != len(optimizers):
        raise CheckpointError(
            f"{folder}: {counted(len(models), 'file')} of model states and {len(optimizers)} of optimizer states"
        )
    return files


def model_files(folder: Path) -> list[Path]:
    """Return the files of model states: one, or one of each rank in order."""
    names = sorted(path.name for path in folder.iterdir())
    for pattern, what in _REFUSED:
        found = next(filter(pattern.fullmatch, names), None)
        if found:
            raise CheckpointError(
                f"{folder}: {found} is of a model with {what}, which is not read; data parallelism is"
            )
    ranks = {int(match[1]): name for name in names if (match := _RANK_MODEL.fullmatch(name)) and int(match[2]) == 0}
    if any(int(match[2]) for name in names if (match := _RANK_MODEL.fullmatch(name))):
        raise CheckpointError(f"{folder}: is of a model with tensor parallelism, which is not read")
    if _WHOLE_MODEL in names:
        return [folder / _WHOLE_MODEL]
    if not ranks:
        tags = ", ".join(tag.name for tag in tags_of(folder))
        raise CheckpointError(f"{folder}: `latest` names none of the tags that are here; name one: {tags}")
    return [inside(folder, ranks[rank]) for rank in _all_ranks(ranks, folder, "model states")]


def _optimizer_files(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir())
    found = [match for name in names if (match := _OPTIMIZER.fullmatch(name))]
    if any(int(match["mp"]) for match in found):
        raise CheckpointError(f"{folder}: is of a model with tensor parallelism, which is not read")
    if len({match["bf16"] for match in found}) > 1:
        raise CheckpointError(
            f"{folder}: has optimizer states with and without bf16_; those of one are left from another run"
        )
    ranks = {int(match["rank"]): match[0] for match in found}
    return [inside(folder, ranks[rank]) for rank in _all_ranks(ranks, folder, "optimizer states")]


def _all_ranks(ranks: Mapping[int, str], folder: Path, what: str) -> list[int]:
    missing = [rank for rank in range(max(ranks, default=-1) + 1) if rank not in ranks]
    if missing:
        raise CheckpointError(f"{folder}: the {what} of rank {missing[0]} are missing")
    return sorted(ranks)


def _optimizer_state(file: TorchFile) -> dict[str, Any]:
    content = file.load()
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.where}: holds no optimizer states of DeepSpeed")
    return state


def _refuse_sections(files: DeepSpeedFiles, folder: Path) -> None:
    config = files.config
    hpz, mics = config.get("zero_hpz_partition_size", 1), config.get("mics_shard_size", -1)
    if (isinstance(hpz, int) and hpz > 1) or (isinstance(mics, int) and mics > 0):
        raise CheckpointError(f"{folder}: written with hpZ or MiCS, whose partitions are not read")


def loss_scale(state: Any) -> dict[str, Any] | None:
    """Return a dynamic loss scaler of DeepSpeed in the form of torch's GradScaler; None for a static one."""
    scaler = state.get("loss_scaler") if isinstance(state, dict) else None
    if not isinstance(scaler, Record) or scaler.kind != "DynamicLossScaler":
        return None
    factor, window = scaler.get("scale_factor", 2.0), scaler.get("scale_window", 1000)
    done = scaler.get("cur_iter", 0) - scaler.get("last_overflow_iter", -1) - 1
    if not isinstance(factor, (int, float)) or not factor or type(window) is not int or window < 1:
        return None
    return {
        "scale": float(scaler.get("cur_scale", 1.0)),
        "growth_factor": float(factor),
        "backoff_factor": 1.0 / factor,
        "growth_interval": window,
        "_growth_tracker": int(done) % window,
    }
