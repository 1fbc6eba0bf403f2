"""Folders of torch's distributed checkpoint (DCP): their metadata, and their items by rows.

Metadata is a pickle (`.metadata`, or `__{rank}.metadata` of each rank when saved without collectives); it is read
without running it. Items are torch.save archives inside of `.distcp` files, at places that only the metadata knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ourshard.runtime.wording import counted

from ..io import inside
from ..source import CheckpointError
from .chunked import Chunk, ChunkedTensor
from .classes import ALLOWED, PickledTensor
from .plaindata import leaves
from .stored import Readable, read_into
from .torchfile import TorchFile
from .unpickle import MAX_PICKLE_NBYTES, Record, unpickle

KeyPath = tuple[str | int, ...]
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_MAX_KEPT = 1 << 16  # bytes of an item that is read once for all that are alike
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Item:
    """Where one archive lies."""

    file: str
    offset: int
    nbytes: int


class DcpFolder:
    """One folder: its tensors as readers and its plain values, both by path, such as ("model", "lm_head.weight")."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: set[int] = set()
        self._sizes: dict[str, int] = {}
        self._values: dict[bytes, list[tuple[KeyPath, Any]]] = {}  # by their bytes: options repeat for each parameter
        self._tensors: dict[str, _TensorRecord] = {}
        self._plain: dict[str, Item] = {}
        self._paths: dict[str, KeyPath] = {}
        for path in metadata_files(folder):
            self._add(path)
        self._check_all_there()

    @property
    def files(self) -> frozenset[str]:
        """Return the names of the files that the metadata refers to."""
        return frozenset(self._sizes)

    def tensors(self) -> Iterator[tuple[KeyPath, Readable]]:
        """Yield each tensor, in the order of the metadata's table, which is the model's; files are in that of ranks."""
        for key in filter(self._tensors.__contains__, self._paths):
            record = self._tensors[key]
            chunks = [
                Chunk(offsets, sizes, partial(self._open, record.items[offsets], key))
                for offsets, sizes in record.chunks.items()
                if 0 not in sizes
            ]
            assert record.dtype is not None  # _check_all_there
            yield self._paths[key], ChunkedTensor(record.shape, record.dtype, chunks, f"{self.folder}: {key}")

    def aliases(self) -> Iterator[tuple[KeyPath, KeyPath]]:
        """Yield (alias, owner) for tensors that are the same items of the files, as `DcpSink` writes tied names."""
        first: dict[frozenset[tuple[tuple[int, ...], Item]], str] = {}
        for key, record in self._tensors.items():
            owner = first.setdefault(frozenset(record.items.items()), key)
            if owner != key:
                yield self._paths[key], self._paths[owner]

    def values(self) -> Iterator[tuple[KeyPath, Any]]:
        """Yield what is no item of its own kind: plain values, and what is in dicts that were saved as one item."""
        for key in filter(self._plain.__contains__, self._paths):
            yield from self._value(key, self._plain[key])

    def scattered(self) -> Iterator[KeyPath]:
        """Yield the tensors whose first piece is not rank 0's: ranks shared the work, so that the order is lost."""
        for key, record in self._tensors.items():
            first = record.items.get((0,) * len(record.shape))
            match = _RANK_FILE.fullmatch(first.file) if first else None
            if match is None or int(match[1]):
                yield self._paths[key]

    def _open(self, item: Item, key: str) -> Readable:
        file = TorchFile(inside(self.folder, item.file), item.offset, item.nbytes, f"{self.folder / item.file}: {key}")
        tensor = file.load()
        if not isinstance(tensor, PickledTensor):
            raise CheckpointError(f"{file.where}: holds no tensor")
        return file.stored(tensor)

    def _value(self, key: str, item: Item) -> list[tuple[KeyPath, Any]]:
        path = inside(self.folder, item.file)
        if not 0 <= item.nbytes <= MAX_PICKLE_NBYTES:
            raise CheckpointError(f"{path}: {key} has {item.nbytes} bytes")
        archive = TorchFile(path, item.offset, item.nbytes, f"{path}: {key}")
        if item.nbytes > _MAX_KEPT:
            return list(leaves(archive, self._paths[key]))
        data = bytearray(item.nbytes)
        read_into(path, item.offset, memoryview(data))
        if bytes(data) not in self._values:
            self._values[bytes(data)] = list(leaves(archive, ()))
        return [((*self._paths[key], *inner), value) for inner, value in self._values[bytes(data)]]

    def _add(self, path: Path) -> None:
        """Add the content of one metadata file."""
        metadata = unpickle(path.read_bytes(), str(path), ALLOWED)
        if not isinstance(metadata, Record) or metadata.kind != "Metadata":
            raise CheckpointError(f"{path}: does not hold the metadata of a distributed checkpoint")
        try:
            self._add_items(metadata)
            self._add_records(metadata)
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: the metadata is damaged: {message}") from error

    def _add_items(self, metadata: Record) -> None:
        for index, info in metadata["storage_data"].items():
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{index['fqn']} is stored with {info['transform_descriptors']!r}, which is not read"
                )
            item = Item(info["relative_path"], info["offset"], info["length"])
            self._check_item(item)
            key, offsets = index["fqn"], index.get("offset")
            if offsets is None:
                self._plain.setdefault(key, item)
            else:
                self._tensors.setdefault(key, _TensorRecord()).items.setdefault(tuple(offsets), item)

    def _add_records(self, metadata: Record) -> None:
        planner = metadata.get("planner_data") or {}
        for key, record in metadata["state_dict_metadata"].items():
            path = planner.get(key, (key,))
            if (
                not isinstance(key, str)
                or not isinstance(path, tuple)
                or not all(isinstance(p, (str, int)) for p in path)
            ):
                raise CheckpointError(f"{key!r} has the odd path {path!r}")
            self._paths[key] = path
            if record.kind == "TensorStorageMetadata":
                self._tensors.setdefault(key, _TensorRecord()).merge(record, key)

    def _check_all_there(self) -> None:
        """Raise if something has a record and no data, or data and no record, or if two have one path."""
        if len(set(self._paths.values())) != len(self._paths):
            raise CheckpointError(f"{self.folder}: two items have the same path in the metadata")
        for key in (self._tensors.keys() | self._plain.keys()) - self._paths.keys():
            raise CheckpointError(f"{self.folder}: {key!r} has data and no record in the metadata")
        for key in self._paths.keys() - self._tensors.keys() - self._plain.keys():
            raise CheckpointError(f"{self.folder}: {key!r} has a record in the metadata and no data")
        for key, tensor in self._tensors.items():
            lost = [
                offsets for offsets, sizes in tensor.chunks.items() if 0 not in sizes and offsets not in tensor.items
            ]
            if lost or tensor.dtype is None:
                raise CheckpointError(f"{self.folder}: the piece of {key!r} at {lost[:1]} is in no file")

    def _check_item(self, item: Item) -> None:
        """Raise if the item leads outside of the folder or lies beyond the end of its file."""
        path = inside(self.folder, item.file)
        if item.file not in self._sizes:
            if not path.is_file():
                raise CheckpointError(f"the file {item.file} is missing")
            self._sizes[item.file] = path.stat().st_size
            match = _RANK_FILE.fullmatch(item.file)
            if match:
                self.ranks.add(int(match[1]))
        if item.offset < 0 or item.nbytes <= 0 or item.offset + item.nbytes > self._sizes[item.file]:
            raise CheckpointError(
                f"{item.file} has {self._sizes[item.file]} bytes, and an item at {item.offset}+{item.nbytes}: truncated"
            )


class _TensorRecord:
    """What the metadata says about one tensor."""

    __slots__ = ("chunks", "dtype", "items", "shape")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: torch.dtype | None = None
        self.chunks: dict[tuple[int, ...], tuple[int, ...]] = {}  # offsets -> sizes
        self.items: dict[tuple[int, ...], Item] = {}  # offsets -> where it lies

    def merge(self, record: Record, key: str) -> None:
        """Take over a record; those of several ranks have to agree."""
        properties, shape = record["properties"], tuple(record["size"])
        dtype = properties["state"][0] if "state" in properties.fields else properties["dtype"]
        if not isinstance(dtype, torch.dtype) or any(type(length) is not int for length in shape):
            raise CheckpointError(f"{key!r} has an odd shape or dtype")
        if self.dtype is not None and (self.shape, self.dtype) != (shape, dtype):
            raise CheckpointError(f"{key!r} is {self.shape} {self.dtype} on one rank and {shape} {dtype} on another")
        self.shape, self.dtype = shape, dtype
        for chunk in record["chunks"]:
            offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            if self.chunks.setdefault(offsets, sizes) != sizes and 0 not in sizes:
                if 0 not in self.chunks[offsets]:
                    raise CheckpointError(
                        f"{key!r} has two pieces at {offsets}, of sizes {self.chunks[offsets]} and {sizes}"
                    )
                self.chunks[offsets] = sizes


def metadata_files(folder: Path) -> list[Path]:
    """Return `.metadata`, else the files of each rank in order. Raises CheckpointError for an unfinished folder."""
    if (folder / ".metadata").is_file():
        return [folder / ".metadata"]
    ranks = {int(match[1]): path for path in folder.iterdir() if (match := _RANK_METADATA.fullmatch(path.name))}
    if not ranks:
        raise CheckpointError(
            f"{folder} has .distcp files and no .metadata: saving did not finish, or it is on the disk of another node"
        )
    missing = sorted(set(range(max(ranks) + 1)) - ranks.keys())
    if missing:
        raise CheckpointError(
            f"{folder}: __{missing[0]}.metadata is missing ({len(missing)} of {counted(max(ranks) + 1, 'rank')})"
        )
    return [ranks[rank] for rank in sorted(ranks)]


def is_dcp_folder(folder: Path) -> bool:
    """Tell whether a folder has the files of a distributed checkpoint, finished or not."""
    if not folder.is_dir():
        return False
    if (folder / ".metadata").is_file():
        return True
    return any(path.suffix == ".distcp" or _RANK_METADATA.fullmatch(path.name) for path in folder.iterdir())
