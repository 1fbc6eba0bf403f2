"""Files written by torch.save: the pickle read without running it, tensors by rows without loading the file.

Such a file is a zip archive whose entries are stored as they are: `NAME/data.pkl`, and `NAME/data/KEY` for each
storage. So the bytes of a tensor have a known place in the file. An archive may lie inside a larger file (DCP puts
many in one). What torch.save never writes is refused: compressed, encrypted, overlapping, doubled or truncated
entries, names that lead outside. torch.save keeps a CRC-32 of each entry (0: it was told not to); it is checked once,
before the first rows are read.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..source import CheckpointError
from .classes import ALLOWED, PickledTensor, storage_of
from .legacy_file import read_legacy
from .stored import Bytes, StoredTensor, read_into
from .unpickle import MAX_PICKLE_NBYTES, unpickle

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
_TAR_MAGIC = slice(257, 262)
_MAX_ENTRIES = 4_000_000


class Window(io.RawIOBase):
    """A part of a file that looks like a file of its own."""

    def __init__(self, file: io.FileIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._position = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(0, self._nbytes - self._position))
        self._file.seek(self._start + self._position)
        got = self._file.readinto(view[:count])
        self._position += got
        return got


class TorchFile:
    """An opened file of torch.save. Holds the directory only; no file stays open."""

    def __init__(self, path: Path, start: int = 0, nbytes: int | None = None, label: str | None = None) -> None:
        """Read the directory of the archive in bytes [start, start + nbytes) of the file; the whole file by default."""
        self.path = path
        self.where = label or str(path)
        self._start = start
        size = path.stat().st_size
        self._nbytes = size - start if nbytes is None else nbytes
        if start < 0 or self._nbytes < 0 or start + self._nbytes > size:
            raise CheckpointError(
                f"{self.where}: lies at {start}+{self._nbytes} in a file of {size} bytes; it is truncated"
            )
        self._entry_bytes: dict[str, Bytes] = {}
        self._legacy = read_legacy(path, self.where) if start == 0 and nbytes is None and self._is_pickle() else None
        self._entries = {} if self._legacy is not None else self._read_directory()

    def load(self) -> Any:
        """Return the saved object; each tensor in it is a `PickledTensor`, to be handed to `stored`."""
        if self._legacy is not None:
            return self._legacy.value
        return unpickle(self._small("data.pkl", MAX_PICKLE_NBYTES), self.where, ALLOWED, storage_of)

    def stored(self, tensor: PickledTensor) -> StoredTensor:
        """Return the reader of a tensor that `load` gave."""
        storage = tensor.storage
        content = self._entry(f"data/{storage.key}") if self._legacy is None else self._legacy.storages[storage.key]
        if content.nbytes != storage.numel * storage.dtype.itemsize:
            raise CheckpointError(
                f"{self.where}: storage {storage.key} has {content.nbytes} bytes where the pickle says "
                f"{storage.numel} elements of {storage.dtype}"
            )
        return StoredTensor(tensor, content)

    def storages(self) -> Iterator[Bytes]:
        """Yield the bytes of each entry, for a check of the whole file."""
        if self._legacy is not None:
            yield from self._legacy.storages.values()
        for name in self._entries:
            yield self._entry(name)

    def _is_pickle(self) -> bool:
        head = bytearray(min(1, self._nbytes))
        read_into(self.path, 0, memoryview(head))
        return head == b"\x80"

    def _read_directory(self) -> dict[str, tuple[zipfile.ZipInfo, int]]:
        """Return name without the archive's own prefix -> (entry, where the next one begins)."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                window = io.BufferedReader(Window(file, self._start, self._nbytes))
                with zipfile.ZipFile(window) as archive:
                    infos, directory = archive.infolist(), archive.start_dir
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            struct.error,
            UnicodeDecodeError,
            OSError,
            ValueError,
        ) as error:
            raise CheckpointError(f"{self.where}: {self._not_an_archive()} ({error})") from error
        if len(infos) > _MAX_ENTRIES:
            raise CheckpointError(f"{self.where}: {len(infos)} entries in the archive")
        if not infos:
            raise CheckpointError(f"{self.where}: an archive without entries was not written by torch.save")
        infos.sort(key=lambda info: info.header_offset)
        starts = [info.header_offset for info in infos[1:]] + [directory]
        entries: dict[str, tuple[zipfile.ZipInfo, int]] = {}
        for info, following in zip(infos, starts, strict=True):
            name = self._checked_name(info)
            if name in entries:
                raise CheckpointError(f"{self.where}: two entries called {name!r}")
            entries[name] = (info, following)
        if "data.pkl" not in entries:
            raise CheckpointError(f"{self.where}: an archive without data.pkl was not written by torch.save")
        if "byteorder" in entries:
            self._check_byte_order(entries)
        return entries

    def _not_an_archive(self) -> str:
        head = bytearray(min(_TAR_MAGIC.stop, self._nbytes))
        read_into(self.path, self._start, memoryview(head))
        if self._nbytes == 0:
            return "is empty"
        if head[:4] == b"PK\x03\x04":
            return "is truncated or damaged: the directory at its end is not readable"
        if head[_TAR_MAGIC] == b"ustar":
            return "is in the tar format of torch before 0.1.10; load and save it again with an older torch"
        return "was not written by torch.save"

    def _checked_name(self, info: zipfile.ZipInfo) -> str:
        parts = info.filename.split("/")
        if len(parts) < 2 or any(part in ("", "..", ".") for part in parts):
            raise CheckpointError(f"{self.where}: an entry with the odd name {info.filename!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CheckpointError(
                f"{self.where}: entry {info.filename} is compressed; torch.save stores entries as they are"
            )
        if info.flag_bits & _ENCRYPTED:
            raise CheckpointError(f"{self.where}: entry {info.filename} is encrypted")
        return "/".join(parts[1:])

    def _check_byte_order(self, entries: dict[str, tuple[zipfile.ZipInfo, int]]) -> None:
        self._entries, self._entry_bytes = entries, {}
        order = self._small("byteorder", 16).decode("ascii", "replace")
        if order != sys.byteorder:
            raise CheckpointError(
                f"{self.where}: written on a {order}-endian machine; this one is {sys.byteorder}-endian"
            )

    def _entry(self, name: str) -> Bytes:
        if name in self._entry_bytes:
            return self._entry_bytes[name]
        if name not in self._entries:
            raise CheckpointError(f"{self.where}: entry {name!r} is missing")
        info, following = self._entries[name]
        header = bytearray(_LOCAL_HEADER.size)
        read_into(self.path, self._start + info.header_offset, memoryview(header))
        magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        begin = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if magic != b"PK\x03\x04" or begin + info.file_size > following:
            raise CheckpointError(f"{self.where}: entry {name!r} is damaged or overlaps the next one")
        content = Bytes(self.path, self._start + begin, info.file_size, info.CRC or None, f"{self.where}: {name}")
        self._entry_bytes[name] = content
        return content

    def _small(self, name: str, limit: int) -> bytearray:
        content = self._entry(name)
        if content.nbytes > limit:
            raise CheckpointError(f"{self.where}: entry {name!r} has {content.nbytes} bytes, more than {limit}")
        data = bytearray(content.nbytes)
        read_into(content.path, content.start, memoryview(data))
        if content.crc is not None and zlib.crc32(data) != content.crc:
            raise CheckpointError(f"{self.where}: entry {name!r} is damaged: its checksum differs")
        return data
