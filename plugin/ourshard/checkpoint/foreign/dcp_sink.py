"""Write folders of torch's distributed checkpoint as accelerate's FSDP2 loads them, tensors streamed in blocks.

A folder has a file for each rank, as if so many ranks had saved; loading does not depend on their number. A tied name
is a second record of its owner's items, so that its bytes are in the files once. Only `.metadata` tells where items
are; it is written last.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from ..huggingface_sink import write_companions
from ..sink import Sink, SinkOptions
from ..source import BUFFER, PARAM, Source, TensorInfo, TensorKey
from ..torch_archive import Archive
from ..workspace import OutputStream, Workspace
from .adapters import adapter_only_names
from .torchfile import Window

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"


@dataclass(frozen=True, slots=True)
class _Piece:
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
    files: list[list[_Piece]]
    aliases: dict[tuple[str | int, ...], tuple[str | int, ...]] = field(default_factory=dict)

    def spread(self, path: tuple[str | int, ...], info: TensorInfo) -> None:
        """Give each rank its rows, cut as torch.chunk cuts; tensors of one number go to the first rank."""
        if not info.shape:
            self.files[0].append(_Piece(path, info.key))
            return
        part = max(1, -(-info.rows // len(self.files)))
        for rank, start in enumerate(range(0, max(1, info.rows), part)):
            self.files[rank].append(_Piece(path, info.key, start, min(info.rows, start + part)))

    def value(self, path: tuple[str | int, ...], value: Any) -> None:
        """Put a plain value, or a tensor that is at hand, into the first rank's file."""
        self.files[0].append(_Piece(path, value=value))


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
    names = [f"__{rank}_0.distcp" for rank in range(len(folder.files))]

    def write(rank: int) -> list[tuple[int, int]]:
        return _write_file(f"{folder.name}/{names[rank]}", folder.files[rank], source, workspace)

    places = workspace.map(write, range(len(names)))
    metadata = _Table(source)
    for name, pieces, spans in zip(names, folder.files, places, strict=True):
        for piece, (start, stop) in zip(pieces, spans, strict=True):
            metadata.add(piece, _StorageInfo(name, start, stop - start))
    for alias, owner in folder.aliases.items():
        metadata.alias(alias, owner)
    workspace.write_bytes(f"{folder.name}/.metadata", pickle.dumps(metadata.finish(), protocol=4))


def _write_file(name: str, pieces: Sequence[_Piece], source: Source, workspace: Workspace) -> list[tuple[int, int]]:
    """Write the items of a rank one after another; return where each begins and ends."""
    if workspace.finished(name):
        return _spans_of(name, len(pieces), workspace)
    spans = []
    with workspace.create(name) as stream:
        for piece in pieces:
            start = stream.tell()
            _write_item(piece, source, workspace, stream)
            spans.append((start, stream.tell()))
    return spans


def _write_item(piece: _Piece, source: Source, workspace: Workspace, stream: OutputStream) -> None:
    if piece.key is None:
        buffer = io.BytesIO()
        torch.save(piece.value, buffer)
        stream.write(buffer.getbuffer())
        return
    archive = Archive(source)
    rows = (piece.start, piece.stop) if source.tensors[piece.key].shape else None
    archive.write_into(workspace, stream, "archive", archive.tensor(piece.key, rows))


def _spans_of(name: str, count: int, workspace: Workspace) -> list[tuple[int, int]]:
    """Find the items of a file that a stopped run has finished: an archive's directory, at its end, tells its begin."""
    spans: list[tuple[int, int]] = []
    with open(workspace.folder / name, "rb", buffering=0) as file:
        stop = file.seek(0, io.SEEK_END)
        for _ in range(count):
            with zipfile.ZipFile(io.BufferedReader(Window(file, 0, stop))) as archive:
                start = min(info.header_offset for info in archive.infolist())
            spans.insert(0, (start, stop))
            stop = start
    if stop != 0:
        raise RuntimeError(f"{name} has other items than were planned")
    return spans


class _Table:
    """The metadata of a folder while it is gathered."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.records: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.indexes: defaultdict[str, list[dcp.MetadataIndex]] = defaultdict(list)

    def add(self, piece: _Piece, place: _StorageInfo) -> None:
        """Add an item."""
        fqn = piece.fqn
        self.paths[fqn] = piece.path
        if piece.key is not None:
            info = self.source.tensors[piece.key]
            self._add_chunk(fqn, info.shape, info.dtype, (piece.start, piece.stop), place)
        elif isinstance(piece.value, torch.Tensor):
            self._add_chunk(fqn, tuple(piece.value.shape), piece.value.dtype, (0, 1), place)
        else:
            self.records[fqn] = dcp.BytesStorageMetadata()
            self._place(dcp.MetadataIndex(fqn), place)

    def _add_chunk(
        self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int], place: _StorageInfo
    ) -> None:
        offsets = torch.Size((rows[0], *(0 for _ in shape[1:])) if shape else ())
        sizes = torch.Size((rows[1] - rows[0], *shape[1:]) if shape else ())
        record = self.records.setdefault(
            fqn, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), [])
        )
        record.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        self._place(dcp.MetadataIndex(fqn, offsets, len(record.chunks) - 1), place)

    def _place(self, index: dcp.MetadataIndex, place: _StorageInfo) -> None:
        self.places[index] = place
        self.indexes[index.fqn].append(index)

    def alias(self, path: tuple[str | int, ...], owner: tuple[str | int, ...]) -> None:
        """Add a name for items that are there."""
        fqn, of = ".".join(map(str, path)), ".".join(map(str, owner))
        self.paths[fqn], self.records[fqn] = path, self.records[of]
        for index in list(self.indexes[of]):
            self._place(dcp.MetadataIndex(fqn, index.offset, index.index), self.places[index])

    def finish(self) -> dcp.Metadata:
        """Return what is pickled; no path of this machine goes into it."""
        return dcp.Metadata(
            state_dict_metadata=self.records,
            planner_data=self.paths,
            storage_data=self.places,
            storage_meta=dcp.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )


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
