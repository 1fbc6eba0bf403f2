"""Write files that torch.load reads, without holding their tensors: the pickle first, then the storages.

torch.save needs all tensors in memory at once. The file is a zip archive of stored entries: `data.pkl`, whose tensors
name their storages by number, and `data/NUMBER`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch

from .archive_writer import ArchivePlan, Content, Rows, plan_archive, write_archives
from .source import Source, TensorInfo, TensorKey
from .tensor_bytes import bytes_of
from .workspace import Workspace

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
    torch.complex128: "ComplexDoubleStorage",
}  # all others have a storage without a type


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands for a storage while pickling: `content` is its bytes, or the rows of the source that they are."""

    info: TensorInfo
    number: int
    content: Content


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
        if info.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, info.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Refer to a storage as torch.save does."""
        if not isinstance(value, _Storage):
            return None
        info = value.info
        if info.dtype in _STORAGES:
            return "storage", getattr(torch, _STORAGES[info.dtype]), str(value.number), "cpu", info.numel
        return "storage", torch.UntypedStorage, str(value.number), "cpu", info.nbytes


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
        storage = _Storage(info, len(self._storages), Rows(info, rows[0] if rows else 0))
        return _Tensor(self._storages.setdefault((key, rows), storage))

    def plain(self, value: Any) -> Any:
        """Return plain data with stand-ins for the tensors in it, which are at hand and small."""
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous()
            number = len(self._storages)
            info = TensorInfo(TensorKey("plain", str(number)), tuple(data.shape), data.dtype)
            return _Tensor(self._storages.setdefault((number, None), _Storage(info, number, bytes_of(data))))
        if isinstance(value, dict):
            return {key: self.plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.plain(item) for item in value)
        return value

    def write(self, workspace: Workspace, name: str, value: Any) -> None:
        """Write the object, unless the file is finished; its tensors are read while it is written."""
        stem = name.rsplit("/", 1)[-1].rsplit(".", 1)[0]
        plan = self.plan(stem, value)
        write_archives(workspace, name, self._source, 1, lambda _: plan)

    def plan(self, stem: str, value: Any) -> ArchivePlan:
        """Lay out the archive of the object; `stem` is the folder within the archive."""
        return plan_archive(
            [
                (f"{stem}/data.pkl", _pickled(value)),
                (f"{stem}/byteorder", sys.byteorder.encode()),
                *((f"{stem}/data/{storage.number}", storage.content) for storage in self._storages.values()),
                (f"{stem}/version", b"3\n"),
            ]
        )


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()
