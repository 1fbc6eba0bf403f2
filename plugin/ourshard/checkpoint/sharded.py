"""Read our sharded format: any rows of any tensor, whatever the world that wrote it, only the bytes of these rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ourshard.runtime.wording import counted, shorten

from . import plain
from .companions import companions
from .io import inside
from .manifest import NAME, PARTIAL_NAMES, PLAIN, FileRecord, Manifest, load, merge, unseal
from .numbered import Models, numbered, of_model
from .pieces import FilePool, Piece, digest_of, gaps_of, overlapping, read_run, read_run_into, where
from .shard_writer import rank_state_path
from .source import CheckpointError, Source, TensorInfo, TensorKey

FOLDER = "ourshard"  # in a folder of `save_state`; a second model's is ourshard_1


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, or join those of several nodes that were copied into one folder.

    Raises CheckpointError if there is none: a save that did not finish.
    """
    whole = folder / NAME
    paths = [whole] if whole.exists() else sorted(folder.glob(PARTIAL_NAMES))
    if not paths:
        raise CheckpointError(f"{folder} has no {NAME}: it is no checkpoint of ourshard, or its save did not finish")
    return merge([load(path.read_bytes(), path) for path in paths])


class ShardedSource(Source):
    """A folder of our sharded format. `verify_reads` checks the hash of every piece that a read touches, once.

    `manifest`: of all disks of a checkpoint, of which this folder holds what is in `own`.
    """

    format = "ourshard"
    looks_for = f"a folder with {NAME}"

    def __init__(
        self,
        path: Path,
        *,
        verify_reads: bool = False,
        model: int = 0,
        manifest: Manifest | None = None,
        own: Manifest | None = None,
    ) -> None:
        path = path / of_model(FOLDER, model) if self.models_in(path) else path
        super().__init__(path)
        self.manifest = manifest or read_manifest(path)
        self._here = {record.path: record for record in (own or self.manifest).files}
        self.tensors = {**self.manifest.tensors, **_scalar_infos(self.manifest)}
        self.description = replace(
            self.manifest.description,
            files=_files(path, self.manifest),
            losses=tuple(_losses(self.manifest)),
            oddities=tuple(_oddities(self.manifest)),
        )
        self.is_own = "ourshard" in self.description.versions
        try:
            self._pieces = self.manifest.pieces(self._here)
            if not _absent_ranks(self.manifest):
                self._refuse_gaps()
        except CheckpointError as error:
            raise CheckpointError(f"{path / NAME}: {error}") from error
        self._pool = FilePool(path, {record.path: record.nbytes for record in self.manifest.files})
        self._unchecked: set[Piece] = set()
        if verify_reads:
            self.check_reads()

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder with the manifest: `path`, its only subfolder that has one, or the folder of the file."""
        if path.is_file():
            return path.parent if path.name == NAME else None
        if is_ours(path):
            return path
        inner = [child for child in path.iterdir() if not child.name.startswith(".") and is_ours(child)]
        if len(inner) == 1:
            return inner[0]
        models = cls.models_in(path)
        return path if inner and len(models) == len(inner) else None

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of folders, as `save_state` gives them."""
        folders = {} if is_ours(found) else numbered(found, rf"{FOLDER}(?:_(?P<n>\d+))?")
        return {number: names for number, names in folders.items() if is_ours(found / names[0])}

    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return these rows. A missing piece is refused with its file and rows."""
        info = self.tensors[key]
        start, stop = info.rows_within(start_row, stop_row)
        run = self.read_run(key, start * info.row_numel, stop * info.row_numel)
        return run.reshape(info.shape_of(start, stop))

    def read_run(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Return these elements, 1-d; reads no byte of others."""
        info = self.tensors[key]
        if not 0 <= start <= stop <= info.numel:
            raise ValueError(f"{key}: elements {start}:{stop} of a tensor with {info.numel}")
        if key in self.manifest.scalars:
            return self.manifest.scalars[key].reshape(1)[start:stop].clone()
        with self._checked(key, start, stop):
            return read_run(self._pool, info, self._pieces[key], start, stop)

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the elements from `start` on."""
        if key in self.manifest.scalars:
            super().read_run_into(key, start, target)
            return
        info = self.tensors[key]
        with self._checked(key, start, start + target.nbytes // info.dtype.itemsize):
            read_run_into(self._pool, info, self._pieces[key], start, target)

    @contextmanager
    def _checked(self, key: TensorKey, start: int, stop: int) -> Iterator[None]:
        """Check the hashes of the pieces that a read touches, if asked for; say whose rows are missing."""
        for piece in overlapping(self._pieces[key], start, stop) if self._unchecked else ():
            if piece in self._unchecked:
                self._check(piece, key)
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_whose(self.manifest)}") from error

    def shards_of(self, key: TensorKey) -> int:
        """Return in how many files the tensor lies; 0 for state that is in the manifest."""
        return len(self._pieces.get(key, ()))

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return the state that belonged to this rank alone; empty if it saved none or its file is not here."""
        name = rank_state_path(rank)
        if not any(record.path == name for record in self.manifest.files):
            return {}
        path = self.path / name
        return plain.decode(unseal(path.read_bytes(), path))

    def check_reads(self) -> None:
        """Check the hash of each piece when a read first touches it."""
        self._unchecked = {piece for pieces in self._pieces.values() for piece in pieces}

    def verify_files(self, share: slice = slice(None)) -> Iterator[tuple[str, str | None]]:
        """Check every byte of every file against the manifest, and that the pieces are the whole of each tensor.

        `share`: which of the files, where ranks divide the work.
        """
        for record in list(self._here.values())[share]:
            try:
                self._verify_file(record)
                yield record.path, None
            except (CheckpointError, OSError) as error:
                yield record.path, str(error)
        for problem in self._gaps():
            yield NAME, problem

    def check_sizes(self) -> None:
        """Raise CheckpointError unless all rows have a file and all files their length; reads no data.

        Of a node's disk, only what is there is looked at.
        """
        for record in self._here.values():
            path = inside(self.path, record.path)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size != record.nbytes:
                raise CheckpointError(f"{path} is cut off: {path.stat().st_size} bytes, written were {record.nbytes}")
        if not _absent_ranks(self.manifest):
            self._refuse_gaps()

    def elsewhere(self, key: TensorKey, start: int, stop: int) -> list[str]:
        """Return which of these elements are on another node's disk, one text for each piece."""
        if key in self.manifest.scalars or start == stop:
            return []
        info = self.tensors[key]
        ranks = {record.path: record.rank for record in self.manifest.files}
        return [
            f"{where(info, piece.start, piece.stop)} of {key} are in {piece.file} of rank {ranks[piece.file]}"
            for piece in overlapping(self._pieces[key], start, stop)
            if piece.file not in self._here
        ]

    def refuse_damage(self, share: slice = slice(None)) -> None:
        """Raise CheckpointError unless sizes of all files and hashes of these files are those that were written."""
        self.check_sizes()
        problems = [problem for _, problem in self.verify_files(share) if problem]
        if problems:
            raise CheckpointError(shorten(problems, 8))

    def close(self) -> None:
        """Close the files."""
        self._pool.close()

    def _refuse_gaps(self) -> None:
        for problem in self._gaps():
            raise CheckpointError(problem)

    def _gaps(self) -> Iterator[str]:
        for key, info in self.manifest.tensors.items():
            for start, stop in gaps_of(info, self._pieces[key]):
                yield f"{key}: {where(info, start, stop)} are in no file{_whose(self.manifest)}"

    def _check(self, piece: Piece, key: TensorKey) -> None:
        if digest_of(self._pool, piece.file, piece.begin, piece.nbytes) != piece.digest:
            what = where(self.tensors[key], piece.start, piece.stop)
            raise CheckpointError(f"{self.path / piece.file} is damaged: the hash of {what} of {key} is another")
        self._unchecked.discard(piece)

    def _verify_file(self, record: FileRecord) -> None:
        if digest_of(self._pool, record.path, 0, record.head_nbytes) != record.digest:
            what = "its content" if record.group == PLAIN else "the hash of its header"
            raise CheckpointError(f"{self.path / record.path} is damaged: {what} is not what was written")
        for key, piece in self._pieces_of_file.get(record.path, ()):
            self._check(piece, key)

    @cached_property
    def _pieces_of_file(self) -> dict[str, list[tuple[TensorKey, Piece]]]:
        table: dict[str, list[tuple[TensorKey, Piece]]] = {}
        for key, pieces in self._pieces.items():
            for piece in pieces:
                table.setdefault(piece.file, []).append((key, piece))
        return table


def is_of_a_node(folder: Path) -> bool:
    """Tell whether a folder has manifests of some disks of a checkpoint, and none of all of it."""
    return is_ours(folder) and not (folder / NAME).is_file()


def is_ours(folder: Path) -> bool:
    """Tell whether a folder has a manifest of ours."""
    return folder.is_dir() and ((folder / NAME).is_file() or any(folder.glob(PARTIAL_NAMES)))


def _files(path: Path, manifest: Manifest) -> dict[str, Path]:
    """Return what goes along: files that the save put in, and those of the run's folder around it."""
    outer = companions(path.parent) if (path.parent / "trainer_state.json").is_file() else {}
    own = {
        record.path: path / record.path for record in manifest.files if record.group == PLAIN and record.rank is None
    }
    return {**outer, **companions(path), **own}


def _scalar_infos(manifest: Manifest) -> dict[TensorKey, TensorInfo]:
    return {key: TensorInfo(key, (), tensor.dtype) for key, tensor in manifest.scalars.items()}


def _absent_ranks(manifest: Manifest) -> list[int]:
    return sorted(set(range(manifest.description.world_size or 0)) - set(manifest.ranks))


def _whose(manifest: Manifest) -> str:
    """Say which ranks' files are not here, if any: on disks that are not shared they are on another node."""
    absent = _absent_ranks(manifest)
    return f"; the files of ranks {absent} are not in this folder (on another node's disk?)" if absent else ""


def _losses(manifest: Manifest) -> Iterator[str]:
    left_out = manifest.description.left_out
    if left_out:
        yield f"{counted(len(left_out), 'frozen parameter')}, which the save left out (checkpoint.frozen)"


def _oddities(manifest: Manifest) -> Iterator[str]:
    if any(key.is_local for key in manifest.tensors):
        yield "the optimizer's state loads in the layout that saved it alone: on as many ranks, at the same stage"
    absent = _absent_ranks(manifest)
    if absent:
        yield f"the files of ranks {absent} of {manifest.description.world_size} are not in this folder"
