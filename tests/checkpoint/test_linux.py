"""Room is taken before a file is written, and its bytes begin to go to the disk while it is."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from ourshard.checkpoint import linux
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.io import DiskIO

from tests.checkpoint.making import make_state, save

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls of Linux")


def test_room_is_taken_without_a_change_of_length(tmp_path: Path) -> None:
    with open(tmp_path / "file", "xb") as file:
        linux.allocate(file.fileno(), 1 << 20)
        linux.begin_flush(file.fileno())
        assert os.fstat(file.fileno()).st_size == 0
        taken = os.fstat(file.fileno()).st_blocks * 512
        assert taken == 0 or taken >= 1 << 20  # 0: a file system that cannot


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a small file system")
def test_a_full_disk_is_known_before_a_byte_is_written() -> None:
    path = Path(f"/dev/shm/ourshard-test-{os.getpid()}")
    try:
        with open(path, "xb") as file, pytest.raises(OSError) as raised:
            linux.allocate(file.fileno(), 1 << 50)
        assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
    finally:
        path.unlink()


class Without(DiskIO):
    """A system that has neither call."""

    def __init__(self) -> None:
        self.asked = 0

    def allocate(self, file: BinaryIO, nbytes: int) -> None:
        self.asked += 1

    def begin_flush(self, file: BinaryIO) -> None:
        return None


@pytest.mark.parametrize("to", ["ourshard", "torch", "dcp"])
def test_the_result_is_the_same_where_the_system_cannot(tmp_path: Path, to: str) -> None:
    save(tmp_path / "ours", make_state(), 2)
    io = Without()
    convert(tmp_path / "ours", tmp_path / "with", to=to)
    convert(tmp_path / "ours", tmp_path / "without", to=to, io=io)
    assert io.asked
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def contents(folder: Path) -> dict[str, Any]:
    """Return the bytes of all files; the manifest has the time of writing."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "ourshard.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
