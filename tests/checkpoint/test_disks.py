"""Disks that are full, read-only or gone: an error on all ranks, and no harm done."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.io import DISK, DiskIO
from ourshard.checkpoint.source import CheckpointError

from tests.checkpoint.test_running import made, steps

pytestmark = pytest.mark.ranks

NBYTES = 60 << 10  # of the small disk: one save fits, in whole pages, and no second


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={NBYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class Vanishing(DiskIO):
    """Removes the folder above the save when the first file is to be flushed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moved = self.root.with_name("elsewhere")

    def flush(self, file: BinaryIO) -> None:
        if not self.moved.exists():
            self.root.rename(self.moved)
        super().flush(file)


def save_and_wait(model: Any, optimizer: Any, folder: Path, io: DiskIO) -> None:
    import ourshard

    ourshard.save(model, optimizer, folder, io=io)
    ourshard.wait_for_save()


def saved_and_failed(root: str, what: str, asynchronous: bool) -> tuple[str, list[float], list[float]]:
    """Save, break the disk, save, train on, mend the disk, go back to the first save; return the error and losses."""
    import ourshard
    import torch.distributed as dist

    rank, folder = dist.get_rank(), Path(root)
    model, optimizer = made({"stage": 3, "persist_below": 0, "checkpoint": {"asynchronous": asynchronous}})
    steps(model, optimizer, range(1))
    ourshard.save(model, optimizer, folder / "step-1")
    ourshard.wait_for_save()
    io = DISK
    if what == "read-only" and rank == 0:
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    if what == "gone" and rank == 1:
        io = Vanishing(folder)
    dist.barrier()
    with pytest.raises((CheckpointError, OSError)) as error:
        save_and_wait(model, optimizer, folder / "step-2", io)
    losses = steps(model, optimizer, range(1, 3))
    dist.barrier()
    if what == "read-only" and rank == 0:
        subprocess.run(["mount", "-o", "remount,rw", root], check=True)
    if what == "gone" and rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name("elsewhere").rename(folder)
    dist.barrier()
    newest = newest_complete(folder, verify=True).path
    assert newest == folder / "step-1", newest
    ourshard.load(model, optimizer, newest)
    return str(error.value), losses, steps(model, optimizer, range(1, 3))


WORDS = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    # By who meets it first: a flush, a part, a file, or mkdir between its look and its call.
    "gone": "No such file or directory|was removed while|File exists",
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("what", WORDS)
def test_a_save_that_a_disk_fails_is_an_error_on_all_ranks_and_the_one_before_loads(
    ranks: Any, request: Any, tmp_path: Path, what: str, asynchronous: bool
) -> None:
    root = request.getfixturevalue("disk") if what in ("full", "read-only") else tmp_path / "disk"
    root.mkdir(exist_ok=True)
    for error, losses, again in ranks(2)(saved_and_failed, str(root), what, asynchronous):
        assert re.search(WORDS[what], error), error
        assert losses == again
    left = {path.name for path in root.iterdir()}
    assert left == ({"step-1", ".step-2.writing"} if what == "gone" else {"step-1"})  # what was out of reach stays
