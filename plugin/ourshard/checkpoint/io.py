"""The one door to the disk for what a checkpoint writes: each create, write, flush, rename and removal is a call here.

Tests put an object of their own in its place, that stops at the n-th call, loses what was not flushed, or says that the
disk is full.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from . import linux

Buffer = bytes | bytearray | memoryview

_MAX_BUFFERS = 512  # in one writev; the limit of Linux is 1024


class DiskIO:
    """The operations, on the real disk."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing, unbuffered; an existing one is an error."""
        return open(path, "xb", buffering=0)

    def open(self, path: Path) -> BinaryIO:
        """Open an existing file for writing at any position, unbuffered."""
        return open(path, "r+b", buffering=0)

    def write(self, file: BinaryIO, buffers: Sequence[Buffer]) -> None:
        """Write all of these bytes at the end."""
        _drain(buffers, lambda views, done: os.writev(file.fileno(), views))

    def write_at(self, file: BinaryIO, position: int, buffers: Sequence[Buffer]) -> None:
        """Write all of these bytes, one after another, from this position; may be called from several threads."""
        _drain(buffers, lambda views, done: os.pwritev(file.fileno(), views, position + done))

    def allocate(self, file: BinaryIO, nbytes: int) -> None:
        """Take room on the disk for a file that will have this length, where the system can."""
        linux.allocate(file.fileno(), nbytes)

    def begin_flush(self, file: BinaryIO) -> None:
        """Begin to bring the file's bytes to the disk, where the system can, and return at once."""
        linux.begin_flush(file.fileno())

    def flush(self, file: BinaryIO) -> None:
        """Return when the file's bytes are on the disk."""
        os.fsync(file.fileno())

    def flush_folder(self, path: Path) -> None:
        """Return when the folder's names are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over another, or a folder to a free name, at once."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file; a missing one is fine."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it, a link to one, or a file; a missing one is fine."""
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=not path.exists())


def _drain(buffers: Sequence[Buffer], call: Callable[[Sequence[memoryview], int], int]) -> None:
    """Call until all bytes are written; the system may take a part at a time."""
    views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
    done = first = 0
    while first < len(views):
        written = call(views[first : first + _MAX_BUFFERS], done)
        done += written
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]


DISK = DiskIO()


def write_file(io: DiskIO, path: Path, buffers: Sequence[Buffer]) -> None:
    """Create a file with these bytes and flush it."""
    with io.create(path) as file:
        io.write(file, buffers)
        io.flush(file)


def replace_file(io: DiskIO, path: Path, data: Buffer) -> None:
    """Put these bytes under a name that may exist, so that a reader sees the old or the new, never a part."""
    temporary = path.with_name(f".{path.name}.writing")
    io.remove(temporary)
    write_file(io, temporary, [data])
    io.rename(temporary, path)
    io.flush_folder(path.parent)


def inside(folder: Path, name: str) -> Path:
    """Return folder/name; raise ValueError if the name is absolute, empty, too long, or leads outside of the folder."""
    parts = name.replace("\\", "/").split("/")
    drive = len(parts[0]) > 1 and parts[0][1] == ":"
    odd = any(part in ("", ".", "..") or len(part.encode(errors="replace")) > 255 for part in parts)
    if name.startswith(("/", "\\")) or drive or "\0" in name or odd:
        raise ValueError(f"{name[:300]!r} is not a name inside of {folder}")
    return folder.joinpath(*parts)
