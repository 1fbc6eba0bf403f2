"""Small saved objects (schedulers, scalers, options) as plain data, with their tensors read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..source import CheckpointError
from .classes import PickledTensor
from .stored import StoredTensor
from .torchfile import TorchFile
from .unpickle import Record

_MAX_DEPTH = 32
_MAX_VALUES = 5_000_000
_MAX_TENSOR_NBYTES = 64 << 20


def materialize(file: TorchFile, value: Any = ...) -> Any:
    """Return `value`, by default all that the file holds, as plain data; records become dicts.

    Raises CheckpointError for what is too deep or too large: a pickle can name one list a billion times.
    """
    return _Walk(file).plain(file.load() if value is ... else value, 0)


def read_plain(path: Path) -> Any:
    """Return what a small file of torch.save holds."""
    return materialize(TorchFile(path))


def leaves(file: TorchFile, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, value) of all that is in dicts within dicts: tensors as readers, all else as plain data."""
    yield from _Walk(file).leaves(path, file.load(), 0)


class _Walk:
    def __init__(self, file: TorchFile) -> None:
        self.file = file
        self.left = _MAX_VALUES

    def plain(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if depth > _MAX_DEPTH or self.left < 0:
            raise CheckpointError(f"{self.file.where}: values nested too deep or repeated too often")
        if isinstance(value, PickledTensor):
            return self.tensor(value)
        if isinstance(value, dict):
            return {key: self.plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.plain(item, depth + 1) for item in value)
        if isinstance(value, Record):
            return {key: self.plain(item, depth + 1) for key, item in value.fields.items()}
        return value

    def leaves(
        self, path: tuple[str | int, ...], value: Any, depth: int
    ) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        self.left -= 1
        if depth > _MAX_DEPTH or self.left < 0:
            raise CheckpointError(f"{self.file.where}: values nested too deep or repeated too often")
        if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            for key, item in value.items():
                yield from self.leaves((*path, key), item, depth + 1)
        elif isinstance(value, PickledTensor):
            yield path, self.file.stored(value)
        elif isinstance(value, Record) and value.kind in ("DTensor", "ShardedTensor"):
            yield path, self.whole(path, value)
        else:
            yield path, self.plain(value, depth)

    def whole(self, path: tuple[str | int, ...], value: Record) -> StoredTensor:
        """Return a sharded tensor of which this file has all, as of one rank."""
        local = value.get("_local_tensor")
        if not isinstance(local, PickledTensor) or local.shape != value["shape"]:
            raise CheckpointError(
                f"{self.file.where}: {'.'.join(map(str, path))} is in one pickle, of one rank's part; the others' are "
                "lost (a planner with flatten_state_dict=False saves them so)"
            )
        return self.file.stored(local)

    def tensor(self, value: PickledTensor) -> Any:
        nbytes = value.numel * value.dtype.itemsize
        self.left -= nbytes // 64
        if nbytes > _MAX_TENSOR_NBYTES:
            raise CheckpointError(f"{self.file.where}: a tensor of shape {value.shape} among plain values")
        return self.file.stored(value).read(0, value.shape[0] if value.shape else 1)
