"""Look at the disk before a model is sharded: folder, permission, filesystem, space, speed."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ourshard.offload.file import DiskFile
from ourshard.runtime.disk import BLOCK, DiskNeed
from ourshard.runtime.engine import Engine
from ourshard.runtime.wording import counted, memory_text

logger = logging.getLogger("ourshard")

_TRIED = 16 * 2**20  # bytes that a rank writes and reads to find the speed
_ADAMW = 2  # values that AdamW keeps beside each master
_NOT_LOCAL = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.sshfs", "9p", "virtiofs", "beegfs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes a second that one rank wrote and read, while the others did the same."""

    write: float
    read: float


@dataclass(frozen=True, slots=True)
class _Need:
    """What one rank needs of one filesystem, named by machine and device."""

    where: tuple[str, int]
    nbytes: int  # before the first step
    adamw: int  # with AdamW's state
    free: int


def check_disk(engine: Engine, folder: Path, wanted: DiskNeed) -> None:
    """Raise `ValueError` on all ranks where the folder can't serve any of them. Collective.

    `wanted`: by this rank. Ranks that share a filesystem need its space together.
    """
    control = engine.control
    control.check(why_not(folder), "checking offload.nvme_path")
    where, free = (socket.gethostname(), folder.stat().st_dev), shutil.disk_usage(folder).free
    need = _Need(where, wanted.nbytes, wanted.with_states(_ADAMW), free)
    told = control.gather_objects(need, "comparing the space of offload.nvme_path")
    beside = [other for other in told if isinstance(other, _Need) and other.where == need.where]
    room = _Room(folder, sum(each.nbytes for each in beside), sum(each.adamw for each in beside), len(beside), free)
    control.check(room.lack(), "checking the space of offload.nvme_path")
    error, speed = None, None
    try:
        speed = measure(folder)
    except OSError as problem:
        error = f"offload.nvme_path: writing and reading {_TRIED} bytes in {folder} failed ({problem})."
    control.check(error, "trying offload.nvme_path")
    assert speed is not None
    if engine.mesh.world.rank == 0:
        room.warn()
        _tell(room, wanted, speed)


def why_not(folder: Path) -> str | None:
    """Say why nothing can be kept in a folder, whatever its space; None where something can."""
    if not os.path.isdir(folder):  # Path.is_dir raises where a folder above may not be looked into
        return f"offload.nvme_path: {folder} is not a folder; make it, on a local disk, on every machine."
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"offload.nvme_path: no permission to write in {folder}; give it to this user, or choose another folder."
    return None


@dataclass(frozen=True, slots=True)
class _Room:
    """The space of one filesystem, and what the ranks that share it need."""

    folder: Path
    nbytes: int
    adamw: int
    ranks: int
    free: int

    def lack(self) -> str | None:
        """Say what is missing, if masters and parameters do not fit."""
        if self.nbytes <= self.free:
            return None
        return (
            f"offload.nvme_path: {self.folder} has {memory_text(self.free)} free, and masters and parameters of "
            f"{counted(self.ranks, 'rank')} take {memory_text(self.nbytes)}, with AdamW's state "
            f"{memory_text(self.adamw)}. "
            "Make room, choose another disk, or use cpu."
        )

    def warn(self) -> None:
        """Warn of what may go wrong later."""
        if self.adamw > self.free:
            logger.warning(
                "offload.nvme_path: AdamW would need %s in %s for %d ranks, where %s are free; an optimizer that keeps "
                "less may fit.",
                memory_text(self.adamw),
                self.folder,
                self.ranks,
                memory_text(self.free),
            )
        kind = filesystem_of(self.folder)
        if kind in _NOT_LOCAL or kind in _IN_MEMORY:
            what = "is in memory" if kind in _IN_MEMORY else "is not local"
            logger.warning(
                "offload.nvme_path: %s is a %s, which %s; use a folder on a local disk.", self.folder, kind, what
            )


def _tell(room: _Room, mine: DiskNeed, speed: Speed) -> None:
    stepped = (1 + _ADAMW) * mine.masters
    read, written = stepped + 2 * mine.shards, stepped + mine.shards  # parameters: a forward and a backward; a step
    logger.info(
        "offload.nvme_path: %s (%s, %s free) writes %.2f GB/s and reads %.2f GB/s for each of %d ranks; a batch with "
        "AdamW reads %s and writes %s a rank, in about %.1f s",
        room.folder,
        filesystem_of(room.folder),
        memory_text(room.free),
        speed.write / 1e9,
        speed.read / 1e9,
        room.ranks,
        memory_text(read),
        memory_text(written),
        written / speed.write + read / speed.read,
    )


def measure(folder: Path) -> Speed:
    """Write and read a file as a step would; it is gone after. Raises `OSError`."""
    file = DiskFile(folder, _TRIED)
    start = file.take(_TRIED)
    base = torch.zeros(_TRIED + BLOCK, dtype=torch.uint8, device="cpu")
    buffer = base[-base.data_ptr() % BLOCK :][:_TRIED]
    times = [time.perf_counter()]
    for move in (file.write, file.read):
        for future in move(start, buffer):
            future.result()
        times.append(time.perf_counter())
    return Speed(_TRIED / (times[1] - times[0]), _TRIED / (times[2] - times[1]))


def filesystem_of(folder: Path) -> str:
    """Return the type of the filesystem of a folder, as the system names it; "unknown" where it does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # "36 35 98:0 /root /mount options - type source options"
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return "unknown"
