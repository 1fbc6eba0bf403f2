"""Commit a save, and find the newest complete one. Every step goes through `DiskIO`; no process group here.

Note [Commit]: files are written and flushed in `.NAME.writing`; the manifest is written last in there, flushed; the
folder is renamed to NAME, and the folder above flushed. So a folder called NAME is complete, and a crash at any instant
leaves at most a `.NAME.writing`. To replace an existing NAME it is first renamed to `.NAME.replaced`, and removed when
the new one is in place: at each instant one of the two is complete, and `newest_complete` looks at both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import manifest as manifests
from .io import DISK, DiskIO, replace_file
from .manifest import FileRecord, Manifest
from .pieces import gaps_of, where
from .shard_writer import PARTS
from .sharded import ShardedSource, is_ours
from .source import CheckpointError, Description, TensorInfo, TensorKey

LATEST = "latest"
_NUMBER = re.compile(r"(\d+)$")
_PARTS_OF_OURS = re.compile(r"ourshard\.|\.|shard-\d+|(optimizer|extra|ranks|parts)$")  # how names in our folders begin
_HIDDEN = re.compile(r"\.(.+)\.(writing|replaced|removing)")


def begin(final: Path, *, replace: bool = False, io: DiskIO = DISK) -> Path:
    """Make the empty temporary folder of a save that is to become `final`; FileExistsError if that name is taken.

    `replace`: a checkpoint, or what is left of one, may have it; never a folder with anything else in it.
    """
    if os.path.lexists(final) and not replace:
        raise FileExistsError(f"{final} exists; a checkpoint is not written over another unless that is asked for")
    if final.is_dir() and not final.is_symlink() and not is_ours(final):
        refuse_others(final, sorted(path.name for path in final.iterdir() if not _PARTS_OF_OURS.match(path.name)))
    temporary = temporary_of(final)
    io.remove_tree(temporary)
    io.make_folder(temporary)
    return temporary


def refuse_others(final: Path, others: Sequence[str]) -> None:
    """Raise FileExistsError if a folder that would be replaced has anything in it that is of no checkpoint."""
    if others:
        raise FileExistsError(
            f"{final} is no checkpoint and is not replaced by one: it has {others[0]!r}"
            f"{f' and {len(others) - 1} more' if others[1:] else ''}. Choose another folder, or remove it."
        )


def temporary_of(final: Path) -> Path:
    """Return the folder in which a save is written that is to become `final`."""
    return _beside(final, "writing")


def standing(final: Path) -> Path:
    """Return the complete folder of that name, also where a crash stopped its replacement half-way; see Note [Commit].

    Where there is none, return `final`.
    """
    replaced = _beside(final, "replaced")
    return replaced if not is_ours(final) and is_ours(replaced) else final


def assemble(
    temporary: Path,
    description: Description,
    *,
    ranks: Sequence[int] | None = None,
    mesh: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
    token: str = "",
) -> Manifest:
    """Join the part files of all ranks (`ranks`: those that share this disk) into the manifest.

    `token`: the same on all disks of a save.

    Raises RuntimeError if the parts disagree, or leave elements out or give them twice, and FileNotFoundError if a
    rank has no part or a file is gone.
    """
    world_size = description.world_size
    assert world_size, "a save knows its world size"
    ranks = range(world_size) if ranks is None else ranks
    tensors: dict[TensorKey, TensorInfo] = {}
    scalars: dict[TensorKey, Any] = {}
    files: dict[str, FileRecord] = {}
    for rank in ranks:
        part = _read_part(temporary / PARTS / f"rank-{rank:05d}.json", rank, world_size)
        for key, info in manifests.load_tensors(part["tensors"]).items():
            if tensors.setdefault(key, info) != info:
                raise RuntimeError(f"{key}: rank {rank} says {info}, a rank before it {tensors[key]}")
        for key, value in manifests.load_scalars(part["scalars"]).items():
            if not scalars.setdefault(key, value).equal(value):
                raise RuntimeError(f"{key}: {value} on rank {rank}, {scalars[key]} on a rank before it")
        for entry in part["files"]:
            record = manifests.load_file(entry)
            if files.setdefault(record.path, record) != record:
                raise RuntimeError(f"{record.path} was written by ranks {files[record.path].rank} and {record.rank}")
    manifest = Manifest(
        description=description,
        tensors=tensors,
        scalars=scalars,
        files=tuple(files.values()),
        ranks=tuple(ranks),
        mesh=mesh or {},
        config=config or {},
        token=token,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
    )
    _check_coverage(manifest, whole=len(ranks) == world_size)
    _check_files(temporary, manifest)
    return manifest


def publish(temporary: Path, final: Path, manifest: Manifest, *, replace: bool = False, io: DiskIO = DISK) -> None:
    """Write the manifest and put the folder in its place, as Note [Commit] says."""
    io.remove_tree(temporary / PARTS)
    flush_tree(temporary, io)
    name = manifests.file_name(manifest.ranks, manifest.description.world_size or 0)
    replace_file(io, temporary / name, manifests.dump(manifest))
    put_in_place(temporary, final, replace=replace, io=io)


def put_in_place(temporary: Path, final: Path, *, replace: bool = False, io: DiskIO = DISK) -> None:
    """Rename a finished folder to its name; an existing one stays complete under another until that is done."""
    replaced = _beside(final, "replaced")
    if os.path.lexists(final):
        if not replace:
            raise FileExistsError(f"{final} exists; a checkpoint is not written over another unless that is asked for")
        io.remove_tree(replaced)
        io.rename(final, replaced)
    io.rename(temporary, final)
    io.flush_folder(final.parent)
    io.remove_tree(replaced)


def abandon(temporary: Path, io: DiskIO = DISK) -> None:
    """Remove what a failed save has written."""
    io.remove_tree(temporary)


def flush_tree(folder: Path, io: DiskIO = DISK) -> None:
    """Flush the names in a folder and all below, innermost first."""
    for path, _, _ in os.walk(folder, topdown=False):
        io.flush_folder(Path(path))


def set_latest(root: Path, name: str, io: DiskIO = DISK) -> None:
    """Let `root/latest` name a checkpoint; readers see the old name or the new one."""
    replace_file(io, root / LATEST, f"{name}\n".encode())


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest complete checkpoint, if there is one, and the newer ones that are not, each with the reason."""

    path: Path | None
    skipped: tuple[str, ...]


OfOthers = Callable[[Path], "str | None"]  # why a folder without a manifest of ours is not complete; None: it is


def newest_complete(root: Path, *, inner: str = "", verify: bool = False, of_others: OfOthers | None = None) -> Newest:
    """Find the newest checkpoint in `root` that is complete: all files there, of their length; `verify`: hashes too.

    `inner`: where our folder lies within each ("" if it is the checkpoint itself). Ordered by the number at the end of
    the name, then by the time of the save. `of_others` is asked about numbered folders without a manifest of ours.
    """
    skipped: list[str] = []
    for folder, problem in _newest_first(root, inner, of_others):
        reason = problem or _problem_of_own(folder, inner, verify)
        if reason is None:
            return Newest(folder, tuple(skipped))
        skipped.append(f"{folder}: {reason}")
    return Newest(None, tuple(skipped))


def retain(
    root: Path,
    keep: int,
    *,
    inner: str = "",
    besides: Collection[Path] = (),
    of_others: OfOthers | None = None,
    io: DiskIO = DISK,
) -> list[Path]:
    """Remove all complete checkpoints but the newest `keep`; return them. Those that are not complete do not count.

    They are renamed first, so that one that is removed by half is never taken for a checkpoint. Folders without a
    number at the end of their name ("best") are of no series, and stay. `besides` are kept, too, and count: the oldest
    of the others goes first, and the newest never. `of_others` as in `newest_complete`. What crashes have left of saves
    before the newest goes, too.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: the last good checkpoint is never removed, so it has to be 1 or more")
    numbered = [each for each in _newest_first(root, inner, of_others) if _NUMBER.search(each[0].name)]
    complete = [path for path, problem in numbered if (problem or _problem_of_own(path, inner)) is None]
    held = {path.absolute() for path in besides}
    removable = [path for path in complete[1:] if path.absolute() not in held]
    removed = removable[max(0, len(removable) - max(0, len(complete) - keep)) :]
    for path in removed:
        removing = _beside(path, "removing")
        io.rename(path, removing)
        io.remove_tree(removing)
    if complete:
        _sweep_older(root, complete[0], inner, io)
    return removed


def sweep(root: Path, io: DiskIO = DISK, *, below: int | None = None) -> None:
    """Clear up after a crash: finish removals, drop unfinished saves, and give a replaced one its name back if needed.

    `below`: drop unfinished saves of smaller numbers only; without it, call it when no save is going on.
    """
    for path in sorted(root.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None or not path.is_dir():
            continue
        final, number = root / hidden[1], _NUMBER.search(hidden[1])
        if hidden[2] == "replaced" and not final.exists():
            io.rename(path, final)
        elif hidden[2] != "writing" or below is None or (number is not None and int(number[1]) < below):
            io.remove_tree(path)


def _sweep_older(root: Path, newest: Path, inner: str, io: DiskIO) -> None:
    """Drop what kills have left of saves before the newest complete one: each may be as large as a checkpoint."""
    found = _NUMBER.search(newest.name)
    assert found is not None, newest
    below = int(found[1])
    sweep(root, io, below=below)
    for folder in root.iterdir() if inner else ():
        number = _NUMBER.search(folder.name)
        if number is not None and int(number[1]) < below and folder.is_dir():
            sweep(folder, io)


def _beside(final: Path, what: str) -> Path:
    return final.with_name(f".{final.name}.{what}")


def _read_part(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    try:
        part = manifests.unseal(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"rank {rank} has written no part of the checkpoint in {path.parent}, "
            "or a folder above it was removed while others wrote"
        ) from error
    if (part["rank"], part["world_size"]) != (rank, world_size):
        raise RuntimeError(f"{path} is of rank {part['rank']} in a world of {part['world_size']}, not of {world_size}")
    return part


def _check_coverage(manifest: Manifest, *, whole: bool) -> None:
    for key, pieces in manifest.pieces().items():
        gaps = gaps_of(manifest.tensors[key], pieces)
        if whole and gaps:
            missing = where(manifest.tensors[key], *gaps[0])
            raise RuntimeError(f"{key}: no rank wrote {missing}; the checkpoint is not committed")


def _check_files(temporary: Path, manifest: Manifest) -> None:
    """Raise FileNotFoundError if a file that was written is not there: the folder above may be another by now."""
    for record in manifest.files:
        path = temporary / record.path
        if not path.is_file() or path.stat().st_size != record.nbytes:
            raise FileNotFoundError(f"{path}, or a folder above it, was removed while the checkpoint was written")


def _newest_first(root: Path, inner: str, of_others: OfOthers | None) -> Iterator[tuple[Path, str | None]]:
    """Yield (folder, None) for each that may be a checkpoint, (folder, problem) for each that is none any more."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        hidden = _HIDDEN.fullmatch(folder.name)
        name, state = (hidden[1], hidden[2]) if hidden else (folder.name, "")
        number = _NUMBER.search(name)
        own = _own(folder, inner)
        has_manifest = is_ours(own)
        gone = state == "removing" or (state == "replaced" and (root / name).exists())
        if gone or not folder.is_dir() or not (hidden or number or has_manifest):
            continue
        problem = None if has_manifest else "it has no manifest: not ours, or not finished"
        if not has_manifest and of_others is not None and not hidden:
            problem = of_others(folder)
        if state == "writing":
            problem = "the save was not finished"
        order = (int(number[1]) if number else -1, _time_of(own) if has_manifest else 0)
        found.append((order, folder, problem))
    for _, folder, problem in sorted(found, key=lambda item: item[0], reverse=True):
        yield folder, problem


def _time_of(folder: Path) -> int:
    """Return when a folder was last changed; 0 if it has just gone."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _own(folder: Path, inner: str) -> Path:
    """Return our folder in a checkpoint; an inner one may stand under another name: Note [Commit]."""
    return standing(folder / inner) if inner else folder


def _problem_of_own(folder: Path, inner: str, verify: bool = False) -> str | None:
    own = _own(folder, inner)
    return problem_of(own, verify) if is_ours(own) else None


def problem_of(folder: Path, verify: bool = False) -> str | None:
    """Return why a folder of ours is not complete; None if it is. Reads its data only to `verify` the hashes."""
    try:
        with ShardedSource(folder) as source:
            source.check_sizes()
            return next((problem for _, problem in source.verify_files() if problem), None) if verify else None
    except (CheckpointError, OSError) as error:
        return str(error)
