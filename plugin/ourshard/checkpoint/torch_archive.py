"""Write files that torch.load reads, without holding their tensors: the pickle first, then each storage in blocks.

torch.save needs all tensors in memory at once. The file is a zip archive of stored entries: `data.pkl`, whose tensors
name their storages by number, and `data/NUMBER`. Entries begin at multiples of 64 bytes, for torch.load(mmap=True).
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch

from .io import Buffer
from .source import Source, TensorInfo, TensorKey
from .tensor_bytes import bytes_of
from .workspace import OutputStream, Workspace

_ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes before the name of an entry
_ZIP64_EXTRA = 20  # bytes that zipfile appends to the extra field of a large entry
_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
}


class _Storage:
    """Stands for a storage while pickling: rows [start, start + info.rows) of a tensor of the source, or `data`."""

    def __init__(self, info: TensorInfo, number: int, start: int = 0, data: torch.Tensor | None = None) -> None:
        self.info = info
        self.number = number
        self.start = start
        self.data = data


class _Tensor:
    """Stands for a tensor while pickling; becomes what torch.save writes for one."""

    def __init__(self, storage: _Storage) -> None:
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        info = self._storage.info
        strides, stride = [], 1
        for length in reversed(info.shape):
            strides.append(stride)
            stride *= max(1, length)
        arguments: tuple[Any, ...] = (self._storage, 0, info.shape, tuple(reversed(strides)), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Refer to a storage as torch.save does."""
        if not isinstance(value, _Storage):
            return None
        kind = getattr(torch, _STORAGES[value.info.dtype])
        return "storage", kind, str(value.number), "cpu", value.info.numel


class _Part:
    """The rest of a stream as a file of its own: positions in an archive count from where the archive begins."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream
        self._begin = stream.tell()

    def write(self, data: Buffer) -> int:
        """Append the bytes."""
        return self._stream.write(data)

    def tell(self) -> int:
        """Return the number of bytes written since."""
        return self._stream.tell() - self._begin

    def flush(self) -> None:
        """Do nothing, as the stream does."""


class Archive:
    """Tensors of a source to be saved in one file. `tensor` gives what stands for one in the object to be saved."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._storages: dict[tuple[TensorKey | int, tuple[int, int] | None], _Storage] = {}

    def tensor(self, key: TensorKey, rows: tuple[int, int] | None = None) -> Any:
        """Return the stand-in for this tensor or for rows of it; the same key gives the same storage (tied names)."""
        info = self._source.tensors[key]
        if rows is not None:
            info = replace(info, shape=info.shape_of(*rows))
        if info.dtype not in _STORAGES:
            raise ValueError(f"{key}: torch.save files are not written with dtype {info.dtype}; convert it first")
        storage = _Storage(info, len(self._storages), rows[0] if rows else 0)
        return _Tensor(self._storages.setdefault((key, rows), storage))

    def plain(self, value: Any) -> Any:
        """Return plain data with stand-ins for the tensors in it, which are at hand and small."""
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous()
            number = len(self._storages)
            info = TensorInfo(TensorKey("plain", str(number)), tuple(data.shape), data.dtype)
            return _Tensor(self._storages.setdefault((number, None), _Storage(info, number, data=data)))
        if isinstance(value, dict):
            return {key: self.plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.plain(item) for item in value)
        return value

    def write(self, workspace: Workspace, name: str, value: Any) -> None:
        """Write the object, unless the file is finished; its tensors are read while it is written."""
        if workspace.finished(name):
            workspace.report(sum(storage.info.nbytes for storage in self._storages.values()))
            return
        with workspace.create(name) as stream:
            self.write_into(workspace, stream, name.rsplit("/", 1)[-1].rsplit(".", 1)[0], value)

    def write_into(self, workspace: Workspace, stream: OutputStream, stem: str, value: Any) -> None:
        """Append the object as an archive of its own to a stream; `stem` is the folder within the archive."""
        part = _Part(stream)
        with zipfile.ZipFile(part, "w", allowZip64=True) as archive:  # type: ignore[call-overload]
            _add(archive, part, f"{stem}/data.pkl", _pickled(value))
            _add(archive, part, f"{stem}/byteorder", sys.byteorder.encode())
            for storage in self._storages.values():
                self._add_storage(workspace, archive, part, f"{stem}/data/{storage.number}", storage)
            _add(archive, part, f"{stem}/version", b"3\n")

    def _add_storage(
        self, workspace: Workspace, archive: zipfile.ZipFile, stream: _Part, name: str, storage: _Storage
    ) -> None:
        if storage.data is not None:
            _add(archive, stream, name, bytes_of(storage.data))
            return
        info, first = storage.info, storage.start
        with archive.open(_entry(stream, name), "w", force_zip64=True) as entry:
            rows = max(1, workspace.block_nbytes // max(1, info.row_nbytes))
            for start in range(0, info.rows, rows):
                stop = min(info.rows, start + rows)
                with workspace.buffer((stop - start) * info.row_nbytes) as buffer:
                    self._source.read_run_into(info.key, (first + start) * info.row_numel, buffer)
                    entry.write(buffer)
                workspace.report((stop - start) * info.row_nbytes)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, stream: _Part, name: str, data: bytes | memoryview) -> None:
    with archive.open(_entry(stream, name), "w", force_zip64=True) as entry:
        entry.write(data)


def _entry(stream: _Part, name: str) -> zipfile.ZipInfo:
    """Return an entry whose data will begin at a multiple of 64 bytes: the extra field is padded, as torch pads it."""
    info = zipfile.ZipInfo(name)
    begin = stream.tell() + _LOCAL_HEADER + len(name.encode()) + _ZIP64_EXTRA + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info
