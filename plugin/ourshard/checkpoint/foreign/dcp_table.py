"""The `.metadata` of a DCP folder: a pickle of torch's classes, written item by item.

torch's own classes are not used: to import them takes a second, and a table of them takes a kilobyte an item.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .dcp_sink import File, Folder, Item

_VERSION = "1.0.0"  # of the format
_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_INT32, _UINT32 = struct.Struct("<i"), struct.Struct("<I")
_BLOCK = 1 << 16
_BATCH = 256  # entries of a dict at a time: who reads keeps them on its stack


def pickled_metadata(folder: Folder, files: Sequence[tuple[File, Sequence[int]]]) -> Iterator[bytes]:
    """Yield the pickle in blocks. With a file go the places where its archives begin, and where the last one ends."""
    pickle = _Pickle()
    pickle.begin(_METADATA, "Metadata")
    pickle.word("state_dict_metadata")
    yield from pickle.table(_records(pickle, folder))
    pickle.word("planner_data")
    yield from pickle.table(_paths(pickle, folder))
    pickle.word("storage_data")
    yield from pickle.table(_places(pickle, folder, files))
    pickle.word("storage_meta")
    pickle.begin(_METADATA, "StorageMeta")
    for name in ("checkpoint_id", "save_id", "load_id"):  # no path of this machine goes into it
        pickle.word(name)
        pickle.none()
    pickle.word("modules")
    pickle.put(b"]")
    pickle.end()
    pickle.word("version")
    pickle.word(_VERSION)
    pickle.end()
    pickle.put(b".")
    yield pickle.drain()


def _records(pickle: _Pickle, folder: Folder) -> Iterator[None]:
    """Write what is said of each name: nothing for a plain value; shape, dtype and pieces of a tensor."""
    for item in folder.items:
        for path in folder.names_of(item):
            pickle.text(_fqn(path))
            if item.dtype is None:
                pickle.made(_METADATA, "BytesStorageMetadata")
            else:
                _write_tensor(pickle, folder, item, item.dtype)
            yield


def _write_tensor(pickle: _Pickle, folder: Folder, item: Item, dtype: torch.dtype) -> None:
    pickle.begin(_METADATA, "TensorStorageMetadata")
    pickle.word("properties")
    pickle.once(dtype, lambda: _write_properties(pickle, dtype))
    pickle.word("size")
    pickle.size(item.shape)
    pickle.word("chunks")
    pickle.put(b"](")
    for chunk in folder.chunks_of(item):
        pickle.begin(_METADATA, "ChunkStorageMetadata")
        pickle.word("offsets")
        pickle.size(chunk.offsets)
        pickle.word("sizes")
        pickle.size(chunk.sizes)
        pickle.end()
    pickle.put(b"e")
    pickle.end()


def _write_properties(pickle: _Pickle, dtype: torch.dtype) -> None:
    """Write dtype, layout, requires_grad, memory format and pin_memory, the state of TensorProperties."""
    pickle.made(_METADATA, "TensorProperties")
    pickle.put(b"(")
    pickle.name("torch", str(dtype).removeprefix("torch."))
    pickle.name("torch.serialization", "_get_layout")
    pickle.word("torch.strided")
    pickle.put(b"\x85R\x89")
    pickle.name(_METADATA, "_MEM_FORMAT_ENCODING")
    pickle.integer(0)  # contiguous
    pickle.put(b"\x85R\x89tb")


def _paths(pickle: _Pickle, folder: Folder) -> Iterator[None]:
    """Write the path of each name."""
    for item in folder.items:
        for path in folder.names_of(item):
            pickle.text(_fqn(path))
            pickle.put(b"(")
            for part in path:
                if isinstance(part, int):
                    pickle.integer(part)
                else:
                    pickle.text(part)
            pickle.put(b"t")
            yield


def _places(pickle: _Pickle, folder: Folder, files: Sequence[tuple[File, Sequence[int]]]) -> Iterator[None]:
    """Write where each piece lies, under each of its names."""
    for file, begins in files:
        for place, number in enumerate(file.members):
            item = folder.items[number]
            chunk = folder.chunk_of(item, file.rank)
            for path in folder.names_of(item):
                pickle.begin(_METADATA, "MetadataIndex")
                pickle.word("fqn")
                pickle.text(_fqn(path))
                pickle.word("offset")
                pickle.none() if chunk is None else pickle.size(chunk.offsets)
                pickle.word("index")
                pickle.none() if chunk is None else pickle.integer(file.rank)
                pickle.end()
                pickle.begin(_STORAGE, "_StorageInfo")
                pickle.word("relative_path")
                pickle.word(file.name)
                pickle.word("offset")
                pickle.integer(begins[place])
                pickle.word("length")
                pickle.integer(begins[place + 1] - begins[place])
                pickle.end()
                yield


def _fqn(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


class _Pickle:
    """Instructions of a pickle (protocol 2) in their order. What comes again is kept: classes, words, properties."""

    def __init__(self) -> None:
        self._written = bytearray(b"\x80\x02")
        self._memo: dict[Hashable, bytes] = {}

    def put(self, code: bytes) -> None:
        """Write instructions."""
        self._written += code

    def drain(self) -> bytes:
        """Return what was written since the last time."""
        written, self._written = bytes(self._written), bytearray()
        return written

    def table(self, entries: Iterator[None]) -> Iterator[bytes]:
        """Write a dict whose keys and values `entries` writes, one of each at a time; yield blocks of instructions."""
        self.put(b"}(")
        for count, _ in enumerate(entries, 1):
            if count % _BATCH == 0:
                self.put(b"u(")
                if len(self._written) > _BLOCK:
                    yield self.drain()
        self.put(b"u")

    def once(self, key: Hashable, write: Callable[[], None]) -> None:
        """Write a value and keep it, or refer to it if it is kept."""
        known = self._memo.get(key)
        if known is not None:
            self.put(b"j" + known)
            return
        write()
        self._memo[key] = _UINT32.pack(len(self._memo))
        self.put(b"r" + self._memo[key])

    def none(self) -> None:
        """Write None."""
        self.put(b"N")

    def text(self, value: str) -> None:
        """Write a string."""
        data = value.encode("utf-8", "surrogatepass")
        self.put(b"X" + _UINT32.pack(len(data)) + data)

    def word(self, value: str) -> None:
        """Write a string that comes again."""
        self.once(("word", value), lambda: self.text(value))

    def integer(self, value: int) -> None:
        """Write an integer of up to 64 bits."""
        if -(1 << 31) <= value < 1 << 31:
            self.put(b"J" + _INT32.pack(value))
        else:
            self.put(b"\x8a\x08" + value.to_bytes(8, "little", signed=True))

    def name(self, module: str, name: str) -> None:
        """Write a reference to a class, a function or a constant."""
        self.once((module, name), lambda: self.put(f"c{module}\n{name}\n".encode()))

    def size(self, shape: Sequence[int]) -> None:
        """Write a torch.Size."""
        self.name("torch", "Size")
        self.put(b"(")
        for length in shape:
            self.integer(length)
        self.put(b"t\x85R")

    def made(self, module: str, name: str) -> None:
        """Write a new object of a class, without its state."""
        self.name(module, name)
        self.put(b")\x81")

    def begin(self, module: str, name: str) -> None:
        """Write a new object whose fields follow, each a word and a value, up to `end`."""
        self.made(module, name)
        self.put(b"}(")

    def end(self) -> None:
        """Write that the object has no more fields."""
        self.put(b"ub")
