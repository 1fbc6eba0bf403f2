"""Write folders of torch's distributed checkpoint as accelerate's FSDP2 loads them, tensors streamed in blocks.

A folder has files for each rank, as if so many ranks had saved; loading does not depend on their number. A tied name
is a second record of its owner's items, so that its bytes are in the files once. Only `.metadata` tells where items
are; it is written last.
"""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from ..archive_writer import ArchivePlan, write_archives
from ..huggingface_sink import write_companions
from ..sink import Sink
from ..source import BUFFER, PARAM, Source, TensorInfo, TensorKey
from ..torch_archive import Archive
from ..workspace import Workspace
from .adapters import adapter_only_names
from .dcp_table import pickled_metadata

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
FILE_NBYTES = 2_000_000_000  # a rank that has more gets another file, as torch writes with several threads


KeyPath = tuple[str | int, ...]


class Chunk(NamedTuple):
    """The rows of a tensor that one rank's file has."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, int] | None:
        """Return the rows [start, stop); None for a 0-d tensor."""
        return (self.offsets[0], self.offsets[0] + self.sizes[0]) if self.sizes else None


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of the source, or if `info` is None a plain value or a tensor that is at hand."""

    path: KeyPath
    info: TensorInfo | None = None
    value: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape; () if it is no tensor."""
        if self.info is not None:
            return self.info.shape
        return tuple(self.value.shape) if isinstance(self.value, torch.Tensor) else ()

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype; None if it is no tensor."""
        if self.info is not None:
            return self.info.dtype
        return self.value.dtype if isinstance(self.value, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class File:
    """A file of one rank: the numbers of the items of which it has pieces."""

    name: str
    rank: int
    members: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class Folder:
    """One DCP folder to be written: its items, cut for so many ranks, and more names for some."""

    name: str
    world: int
    items: list[Item] = field(default_factory=list)
    aliases: dict[KeyPath, list[KeyPath]] = field(default_factory=dict)  # path of an item -> its other names

    def names_of(self, item: Item) -> list[KeyPath]:
        """Return all names of an item."""
        return [item.path, *self.aliases.get(item.path, ())]

    def chunk_of(self, item: Item, rank: int) -> Chunk | None:
        """Return what a rank has of it, cut as torch.chunk cuts; None: nothing, or it is no tensor.

        The first rank has all of what is 0-d or at hand, and the one piece of a tensor without rows.
        """
        if item.dtype is None:
            return None
        shape = item.shape
        if not shape or item.info is None:
            return Chunk((0,) * len(shape), shape) if rank == 0 else None
        part = max(1, -(-shape[0] // self.world))
        start, stop = rank * part, min(shape[0], rank * part + part)
        if rank and start >= shape[0]:
            return None
        return Chunk((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))

    def chunks_of(self, item: Item) -> Iterator[Chunk]:
        """Yield its pieces in order of rank."""
        for rank in range(self.world):
            chunk = self.chunk_of(item, rank)
            if chunk is None:
                return
            yield chunk

    def files(self) -> list[File]:
        """Return the files: at least one of each rank, and more where it has much, so that workers have one each."""
        files = []
        for rank in range(self.world):
            files.append(File(f"__{rank}_0.distcp", rank))
            held = count = 0
            for number, item in enumerate(self.items):
                chunk = self.chunk_of(item, rank)
                if chunk is None and (rank or item.dtype is not None):
                    continue
                nbytes = math.prod(chunk.sizes) * item.dtype.itemsize if chunk and item.dtype else 0
                if held and held + nbytes > FILE_NBYTES:
                    held, count = 0, count + 1
                    files.append(File(f"__{rank}_{count}.distcp", rank))
                held += nbytes
                files[-1].members.append(number)
        return files


class DcpSink(Sink):
    """Writer of `pytorch_model_fsdp_0/` and `optimizer_0/`."""

    format: ClassVar[str] = "dcp"
    summary: ClassVar[str] = "torch's distributed checkpoint, as FSDP2 of accelerate and the Trainer loads it"
    refused_options: ClassVar[Mapping[str, str]] = {"max_shard_size": "its files are cut by rank; use world_size"}

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


def _model_folder(source: Source, world: int) -> Folder:
    """Plan the model's folder. An adapter alone is named as the Trainer names it, without the adapter's own name."""
    folder = Folder(MODEL_FOLDER, world)
    infos = [info for key, info in source.tensors.items() if key.kind in (PARAM, BUFFER)]
    names = adapter_only_names(info.key.name for info in infos)
    for info in infos:
        folder.items.append(Item(("model", names.get(info.key.name, info.key.name)), info))
    for alias, owner in source.description.ties.items():
        if source.weight_key(owner) is not None:
            folder.aliases.setdefault(("model", names.get(owner, owner)), []).append(("model", alias))
    return folder


def _optimizer_folder(source: Source, world: int) -> Folder:
    folder = Folder(OPTIMIZER_FOLDER, world)
    for key, info in source.tensors.items():
        if key.is_state:
            folder.items.append(Item(("optimizer", "state", key.name, key.kind), info))
    for name, values in source.description.param_state.items():
        for kind, value in values.items():
            folder.items.append(Item(("optimizer", "state", name, kind), value=_as_torch_keeps(kind, value)))
    for index, group in enumerate(source.description.param_groups):
        for option, value in {**group, "params": list(group["params"])}.items():
            folder.items.append(Item(("optimizer", "param_groups", index, option), value=value))
    return folder


def _as_torch_keeps(kind: str, value: Any) -> Any:
    """Return a step that is a bare number (DeepSpeed's CPU Adam) as the tensor that torch's optimizers have."""
    if kind == "step" and isinstance(value, (int, float)):
        return torch.tensor(float(value), device="cpu")
    return value


def _write_folder(folder: Folder, source: Source, workspace: Workspace) -> None:
    """Write the files of all ranks, and the metadata last."""
    files = folder.files()

    def write(file: File) -> Sequence[int]:
        plan = partial(_item, folder, file, source)
        return write_archives(workspace, f"{folder.name}/{file.name}", source, len(file.members), plan)

    begins = workspace.map(write, files)
    name = f"{folder.name}/.metadata"
    if not workspace.finished(name):
        with workspace.create(name) as stream:
            for block in pickled_metadata(folder, list(zip(files, begins, strict=True))):
                stream.write(block)


def _item(folder: Folder, file: File, source: Source, place: int) -> ArchivePlan:
    """Plan the archive of one item of a file, which is what torch.save would write of it alone."""
    item, archive = folder.items[file.members[place]], Archive(source)
    if item.info is None:
        return archive.plan("archive", archive.plain(item.value))
    chunk = folder.chunk_of(item, file.rank)
    assert chunk is not None
    return archive.plan("archive", archive.tensor(item.info.key, chunk.rows))


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
