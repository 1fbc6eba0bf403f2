"""A file of one rank that masters and optimizer state rest in: read and written past the page cache, by threads.

Note [The file]
---------------
The file has no name: it is unlinked as soon as it is open. The system takes its space back when the process ends, in
whatever way; no later run can take it for its own, and two runs in one folder can't meet. It is as long as it may ever
get, sparse, and mapped into memory once. Parts of it are taken one after the other, each on a block, and get their
space at once, so that no later write can find the disk full.

A step reads and writes with O_DIRECT, in whole blocks and in pieces that several threads move. Everything else (saves,
loads, whole values) goes through the mapping: the kernel writes a mapped page that changed before a direct read of it,
and lets go of it at a direct write (ext4, xfs and btrfs do; `generic_file_direct_write`). Both never run at once. A
filesystem that refuses O_DIRECT (tmpfs, overlay) gets buffered reads and writes of the same kind.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import torch

from ourshard.runtime.disk import BLOCK, padded

PIECE = 8 * 2**20  # what one thread moves at a time
THREADS = 8
_SECTOR = 512  # no direct read or write ends inside of one, but at the end of a file

Move = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


class DiskFile:
    """An unnamed file of up to `capacity` bytes in `folder`: Note [The file]. Raises `OSError`."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.capacity = padded(capacity)
        self.used = 0  # bytes from the start that were taken
        path = folder / f".ourshard-{uuid4().hex}"
        self._plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._direct = _open_direct(path)
        finally:
            path.unlink()
        self.is_direct = self._direct is not None
        os.ftruncate(self._plain, self.capacity)
        self._map = mmap.mmap(self._plain, self.capacity)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ourshard-disk")
        descriptors = [self._plain] if self._direct is None else [self._plain, self._direct]
        weakref.finalize(self, _close, descriptors, self._pool)

    def reserve(self, nbytes: int) -> None:
        """Have the space of the first `nbytes` that are taken from now on."""
        if nbytes:
            os.posix_fallocate(self._plain, self.used, padded(nbytes))

    def take(self, nbytes: int) -> int:
        """Return where the next `nbytes` begin; they have their space, and are zero."""
        start = self.used
        if start + padded(nbytes) > self.capacity:
            raise OSError(errno.EFBIG, f"{start} of {self.capacity} bytes are taken; {nbytes} more do not fit")
        os.posix_fallocate(self._plain, start, padded(nbytes))
        self.used = start + padded(nbytes)
        return start

    def view(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements of the file as a tensor over its mapping."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)

    def is_whole(self) -> bool:
        """Say whether nobody cut the file: a read of the mapping behind its end would end the process."""
        return os.fstat(self._plain).st_size == self.capacity

    def read(self, start: int, buffer: torch.Tensor) -> list[Future[None]]:
        """Begin to fill `buffer` (bytes, whole blocks, on a block) from the file."""
        return self._begin(os.preadv, start, buffer)

    def write(self, start: int, buffer: torch.Tensor) -> list[Future[None]]:
        """Begin to write `buffer` (bytes, whole blocks, on a block) to the file."""
        return self._begin(os.pwritev, start, buffer)

    def _begin(self, move: Move, start: int, buffer: torch.Tensor) -> list[Future[None]]:
        assert buffer.dtype is torch.uint8
        assert buffer.nbytes % BLOCK == 0
        descriptor = self._plain if self._direct is None else self._direct
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say so
        places = range(0, buffer.nbytes, PIECE)
        return [self._pool.submit(_move_all, move, descriptor, view[at : at + PIECE], start + at) for at in places]


def _open_direct(path: Path) -> int | None:
    """Open past the page cache; None where the filesystem can't, which some tell at open and some at the first read."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | flag | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    block = mmap.mmap(-1, BLOCK)
    try:
        os.preadv(descriptor, [block], 0)
    except OSError as problem:
        os.close(descriptor)
        if problem.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return descriptor


def _move_all(move: Move, descriptor: int, view: memoryview, start: int) -> None:
    """Call `os.preadv` or `os.pwritev` until all is moved."""
    done = 0
    while done < len(view):
        count = move(descriptor, [view[done:]], start + done)
        done += count
        if count == 0 or (count % _SECTOR and done < len(view)):
            raise OSError(errno.EIO, f"{move.__name__} of {len(view)} bytes at {start} ended after {done}")


def _close(descriptors: list[int], pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=True)
    for descriptor in descriptors:
        os.close(descriptor)
