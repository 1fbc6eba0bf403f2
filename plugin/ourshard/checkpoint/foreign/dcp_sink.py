"""Write folders of torch's distributed checkpoint as accelerate's FSDP2 loads them, tensors streamed in blocks.

A folder has a file for each rank, as if so many ranks had saved; loading does not depend on their number. A tied name
is a second record of its owner's items, so that its bytes are in the files once. Only `.metadata` tells where items
are; it is written last.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..archive_writer import ArchivePlan, write_archives
from ..huggingface_sink import write_companions
from ..sink import Sink, SinkOptions
from ..source import BUFFER, PARAM, Source, TensorInfo, TensorKey
from ..torch_archive import Archive
from ..workspace import Workspace
from .adapters import adapter_only_names

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor that become one item, or a plain value if `key` is None."""

    path: tuple[str | int, ...]
    key: TensorKey | None = None
    start: int = 0
    stop: int = 1
    value: Any = None

    @property
    def fqn(self) -> str:
        return ".".join(map(str, self.path))


@dataclass(slots=True)
class _Folder:
    """One DCP folder to be written: the pieces of each rank's file, and names that share them."""

    name: str
    files: list[list[Piece]]
    aliases: dict[tuple[str | int, ...], tuple[str | int, ...]] = field(default_factory=dict)

    def spread(self, path: tuple[str | int, ...], info: TensorInfo) -> None:
        """Give each rank its rows, cut as torch.chunk cuts; tensors of one number go to the first rank."""
        if not info.shape:
            self.files[0].append(Piece(path, info.key))
            return
        part = max(1, -(-info.rows // len(self.files)))
        for rank, start in enumerate(range(0, max(1, info.rows), part)):
            self.files[rank].append(Piece(path, info.key, start, min(info.rows, start + part)))

    def value(self, path: tuple[str | int, ...], value: Any) -> None:
        """Put a plain value, or a tensor that is at hand, into the first rank's file."""
        self.files[0].append(Piece(path, value=value))


class DcpSink(Sink):
    """Writer of `pytorch_model_fsdp_0/` and `optimizer_0/`."""

    format: ClassVar[str] = "dcp"
    summary: ClassVar[str] = "torch's distributed checkpoint, as FSDP2 of accelerate and the Trainer loads it"

    def __init__(self, options: SinkOptions) -> None:
        if options.max_shard_size is not None:
            raise ValueError("max_shard_size has no meaning for DCP, whose files are one for each rank: use world_size")
        super().__init__(options)

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold weights, buffers and the optimizer's state."""
        return kind in (PARAM, BUFFER) or TensorKey(kind, "").is_state

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Name what has no place."""
        lost = list(super().losses(source))
        description = source.description
        if description.client_state:
            lost.append("the client state")
        if description.adapter_config is not None and "adapter_config.json" not in description.files:
            lost.append("adapter_config.json")
        if _has_state(source) and not description.param_groups:
            lost.append("the optimizer's state: its parameter groups are not known")
        return tuple(lost)

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write the model, the optimizer if its groups are known, scheduler, scaler and companions."""
        world = self.options.world_size or source.description.world_size or 1
        _write_folder(_model_folder(source, world), source, workspace)
        if source.description.param_groups:
            _write_folder(_optimizer_folder(source, world), source, workspace)
        write_run_files(workspace, source)


def _has_state(source: Source) -> bool:
    return any(key.is_state for key in source.tensors)


def _model_folder(source: Source, world: int) -> _Folder:
    """Plan the model's folder. An adapter alone is named as the Trainer names it, without the adapter's own name."""
    folder = _Folder(MODEL_FOLDER, [[] for _ in range(world)])
    infos = [info for key, info in source.tensors.items() if key.kind in (PARAM, BUFFER)]
    names = adapter_only_names(info.key.name for info in infos)
    for info in infos:
        folder.spread(("model", names.get(info.key.name, info.key.name)), info)
    for alias, owner in source.description.ties.items():
        if TensorKey(PARAM, owner) in source.tensors:
            folder.aliases["model", alias] = ("model", names.get(owner, owner))
    return folder


def _optimizer_folder(source: Source, world: int) -> _Folder:
    folder = _Folder(OPTIMIZER_FOLDER, [[] for _ in range(world)])
    for key, info in source.tensors.items():
        if key.is_state:
            folder.spread(("optimizer", "state", key.name, key.kind), info)
    for name, values in source.description.param_state.items():
        for kind, value in values.items():
            folder.value(("optimizer", "state", name, kind), _as_torch_keeps(kind, value))
    for index, group in enumerate(source.description.param_groups):
        for option, value in {**group, "params": list(group["params"])}.items():
            folder.value(("optimizer", "param_groups", index, option), value)
    return folder


def _as_torch_keeps(kind: str, value: Any) -> Any:
    """Return a step that is a bare number (DeepSpeed's CPU Adam) as the tensor that torch's optimizers have."""
    if kind == "step" and isinstance(value, (int, float)):
        return torch.tensor(float(value))
    return value


def _write_folder(folder: _Folder, source: Source, workspace: Workspace) -> None:
    """Write the files of all ranks, and the metadata last."""
    from .dcp_table import Table  # torch's own classes take a second to import; what only shows help needs none

    names = [f"__{rank}_0.distcp" for rank in range(len(folder.files))]
    plans = [[_item(piece, source) for piece in pieces] for pieces in folder.files]

    def write(rank: int) -> list[int]:
        return write_archives(workspace, f"{folder.name}/{names[rank]}", source, plans[rank])

    table = Table(source.tensors)
    for rank, begins in enumerate(workspace.map(write, range(len(names)))):
        for piece, plan, begin in zip(folder.files[rank], plans[rank], begins, strict=True):
            table.add(piece, names[rank], begin, plan.nbytes)
    for alias, owner in folder.aliases.items():
        table.alias(alias, owner)
    workspace.write_bytes(f"{folder.name}/.metadata", table.pickled())


def _item(piece: Piece, source: Source) -> ArchivePlan:
    """Plan the archive of one item, which is what torch.save would write of it alone."""
    archive = Archive(source)
    if piece.key is None:
        return archive.plan("archive", archive.plain(piece.value))
    rows = (piece.start, piece.stop) if source.tensors[piece.key].shape else None
    return archive.plan("archive", archive.tensor(piece.key, rows))


def write_run_files(workspace: Workspace, source: Source) -> None:
    """Write scheduler and scaler under the names of accelerate and of the Trainer, and copy companions."""
    description = source.description
    schedulers = description.scheduler if isinstance(description.scheduler, list) else [description.scheduler]
    for index, state in enumerate(schedulers):
        if state:
            save_small(workspace, f"scheduler_{index}.bin" if index else "scheduler.bin", state)
            if index == 0:
                save_small(workspace, "scheduler.pt", state)
    if description.scaler:
        save_small(workspace, "scaler.pt", description.scaler)
    write_companions(workspace, source, _weights(source.tensors.values()))
    if "trainer_state.json" in description.files:
        workspace.copy("trainer_state.json", description.files["trainer_state.json"])


def _weights(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    return [info for info in infos if info.key.kind in (PARAM, BUFFER)]


def save_small(workspace: Workspace, name: str, value: Any) -> None:
    """Write plain data with torch.save, unless the file is finished."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    workspace.write_bytes(name, buffer.getbuffer())
