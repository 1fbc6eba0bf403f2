"""Which ranks of a save see one disk.

Note [Disks of nodes]: rank 0 makes the folder of a save, and where all ranks see it, that is all. Where
some do not, each rank leaves a mark in its own folder of that name, and those that see each other's marks share a disk.
The first of them writes what would be rank 0's to write, and a manifest of the ranks on that disk, with a token that
all disks of a save have alike. To load, the ranks exchange these manifests, one for each disk: all then know the whole
checkpoint, and each reads its own rows, which are on its own disk on as many ranks in the same layout. Rows that are
not are refused, with the file and the rank that wrote it. Files of several nodes that were copied into one folder are
a checkpoint as any other.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ourshard.runtime.engine import Engine

from . import commit
from .agreeing import together
from .io import DiskIO, write_file
from .manifest import PARTIAL_NAMES, Manifest, load, merge
from .sharded import is_of_a_node, read_manifest
from .source import Description

logger = logging.getLogger("ourshard")

VISIBLE_WITHIN = 10.0  # seconds from when rank 0 has made a folder until all ranks see it
KNOWN_APART = 0.5  # the same, of a rank that did not see the last one
MARKS = "ranks-that-see-this"


@dataclass(frozen=True, slots=True)
class Disk:
    """The ranks that see this one's folder; `token` is "" where these are all."""

    ranks: tuple[int, ...]
    leads: bool  # this rank writes what belongs to none
    token: str = ""

    def turn(self, holders: Sequence[int], number: int) -> int:
        """Return the rank that writes the `number`-th thing that all `holders` have; one of them is on this disk."""
        here = [rank for rank in holders if rank in self.ranks]
        return here[number % len(here)]

    def publish(self, final: Path, found: Description, engine: Engine, *, replace: bool, io: DiskIO) -> None:
        """Put what these ranks have written in its place, with a manifest."""
        temporary, axes = commit.temporary_of(final), (engine.mesh.replicate, engine.mesh.shard)
        manifest = commit.assemble(
            temporary,
            found,
            ranks=self.ranks,
            mesh={axis.name: axis.size for axis in axes},
            config=engine.config.to_dict(),
            token=self.token,
        )
        commit.publish(temporary, final, manifest, replace=replace, io=io)


_apart = False  # this rank did not see the last folder
_said = False


def find_disk(engine: Engine, final: Path, *, replace: bool, io: DiskIO, several: bool) -> Disk:
    """Return this rank's disk, with the temporary folder of the save made on each. Collective.

    Raises ValueError on all ranks if not all see one disk and `several` are not allowed.
    """
    global _apart
    rank, world = engine.mesh.world.rank, engine.mesh.world.size
    temporary, label = commit.temporary_of(final), f"save: making {final.name}"
    with together(engine, label):
        if rank == 0:
            commit.begin(final, replace=replace, io=io)
    sees = _sees(temporary, KNOWN_APART if _apart else VISIBLE_WITHIN)
    if not engine.control.any_of([not sees], f"{label}: who sees it")[0]:
        _apart = False
        return Disk(tuple(range(world)), leads=rank == 0)
    _apart = not sees
    if not several:
        if rank == 0:
            commit.abandon(temporary, io)
        raise ValueError(
            f"{temporary} was made by rank 0, and not all ranks see it. Save into a folder that the machines share, "
            "or set save_on_each_node, so that each has the rows of its own ranks on its own disk, or save whole "
            "(checkpoint.format: full)."
        )
    return _find_apart(engine, final, replace, io)


def _find_apart(engine: Engine, final: Path, replace: bool, io: DiskIO) -> Disk:
    global _said
    rank, temporary, label = engine.mesh.world.rank, commit.temporary_of(final), f"save: making {final.name}"
    token = str(engine.control.gather_objects(secrets.token_hex(8), label)[0])
    marks = temporary / MARKS
    with together(engine, label):
        io.make_folder(marks)
        write_file(io, marks / f"{token}-{rank}", [b""])
    found = sorted(int(path.name.rpartition("-")[2]) for path in marks.glob(f"{token}-*"))
    disk = Disk(tuple(found), leads=found[0] == rank, token=token)
    try:
        with together(engine, label):
            if disk.leads:
                commit.begin(final, replace=replace, io=io)
    except Exception:
        if disk.leads:
            commit.abandon(temporary, io)
        raise
    if rank == 0 and not _said:
        _said = True
        logger.warning(
            "%s: rank 0 shares its disk with ranks %s only: each machine's disk gets the rows of its own ranks. It "
            "loads on as many ranks in the same places, or anywhere once the folders are copied into one.",
            final, list(disk.ranks),
        )  # fmt: skip
    return disk


def _sees(folder: Path, within: float) -> bool:
    """Tell whether the folder that rank 0 has made is there; a network's file system may take a moment."""
    end = time.monotonic() + within
    while not folder.is_dir():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True, slots=True)
class Joined:
    """The manifest of all disks, and what of it this rank sees: its share of the files that lie here."""

    manifest: Manifest
    own: Manifest
    share: slice


def join_disks(engine: Engine, folder: Path) -> Joined | None:
    """Return what the disks of a checkpoint hold together; None if this rank's folder holds all. Collective.

    Raises CheckpointError on all ranks if the disks hold different saves, or one has none.
    """
    label = f"load: disks of {folder.name}"
    engine.control.agree(label)
    if not engine.control.any_of([is_of_a_node(folder)], label)[0]:
        return None
    own: Manifest | None = None
    with together(engine, label):
        own = read_manifest(folder)
    assert own is not None
    places: list[Any] = engine.control.gather_objects(own.ranks, label)
    rank = engine.mesh.world.rank
    first = places.index(own.ranks) == rank
    told: list[Any] = engine.control.gather_objects(_bytes_of(folder) if first else None, label)
    with together(engine, label):
        manifests = [load(data, folder) for several in told if several is not None for data in several]
        joined = merge(manifests)
    beside = [number for number, ranks in enumerate(places) if ranks == own.ranks]
    return Joined(joined, own, slice(beside.index(rank), None, len(beside)))


def _bytes_of(folder: Path) -> list[bytes]:
    whole = sorted(folder.glob(PARTIAL_NAMES))
    return [path.read_bytes() for path in whole]
