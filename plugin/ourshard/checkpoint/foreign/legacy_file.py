"""Files of torch.save in the format from before torch 1.6, which many `pytorch_model.bin` on the hub still have.

Four pickles follow each other: a magic number, a version, what machine wrote it, and the object; then the keys of the
storages as a fifth, then each storage: 8 bytes with its length in elements, and its bytes. There are no checksums.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..source import CheckpointError
from .classes import ALLOWED, StorageId, storage_of
from .stored import Bytes, read_into
from .unpickle import MAX_PICKLE_NBYTES, unpickle_first

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class LegacyContent:
    """The object, with a `PickledTensor` for each tensor, and where the bytes of each storage are."""

    value: Any
    storages: Mapping[str, Bytes]


def read_legacy(path: Path, where: str) -> LegacyContent:
    """Read the pickles of a file, and find its storages. Raises CheckpointError for a bare pickle too."""
    seen: dict[str, StorageId] = {}

    def storage(persistent_id: Any) -> StorageId:
        if isinstance(persistent_id, tuple) and len(persistent_id) == 6:
            if persistent_id[5] is not None:
                raise CheckpointError("a storage that is a view of another, as torch wrote before 0.4")
            persistent_id = persistent_id[:5]
        found = storage_of(persistent_id)
        if seen.setdefault(found.key, found) != found:
            raise CheckpointError(f"storage {found.key} has two lengths or dtypes")
        return found

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        reader = _Pickles(mapped, where)
        if reader.next() != _MAGIC:
            raise CheckpointError(
                f"{where}: is a bare pickle, not a file of torch.save; load and save it again with torch"
            )
        if reader.next() != _VERSION:
            raise CheckpointError(f"{where}: is of an unknown version of torch.save's format before 1.6")
        machine = reader.next()
        if not isinstance(machine, dict) or machine.get("little_endian") is not True:
            raise CheckpointError(f"{where}: was written on a big-endian machine, or is damaged")
        value, keys = reader.next(storage), reader.next()
        begin = reader.position
    return LegacyContent(value, _storages(path, where, begin, keys, seen))


class _Pickles:
    """Pickles one behind the other in a mapped file, of which only the pages that are read count."""

    def __init__(self, mapped: mmap.mmap, where: str) -> None:
        self._mapped = mapped
        self._where = where
        self.position = 0

    def next(self, persistent: Callable[[Any], Any] | None = None) -> Any:
        """Return the next one."""
        with memoryview(self._mapped) as whole, whole[self.position : self.position + MAX_PICKLE_NBYTES] as data:
            value, nbytes = unpickle_first(data, self._where, ALLOWED, persistent)
        self.position += nbytes
        return value


def _storages(path: Path, where: str, begin: int, keys: Any, seen: Mapping[str, StorageId]) -> dict[str, Bytes]:
    """Walk over the storages in the order of their keys."""
    texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not texts or sorted(keys) != sorted(seen):
        raise CheckpointError(f"{where}: the list of storages is damaged")
    size, storages = path.stat().st_size, {}
    for key in keys:
        length = bytearray(_LENGTH.size)
        read_into(path, begin, memoryview(length))
        begin += _LENGTH.size
        nbytes = seen[key].numel * seen[key].dtype.itemsize
        if _LENGTH.unpack(length)[0] != seen[key].numel or begin + nbytes > size:
            raise CheckpointError(f"{where}: storage {key} is damaged, or the file is truncated")
        storages[key] = Bytes(path, begin, nbytes, None, f"{where}: storage {key}")
        begin += nbytes
    if begin != size:
        raise CheckpointError(f"{where}: {size - begin} bytes follow the last storage")
    return storages
