"""Convert any checkpoint to any format: open, view, write into a temporary folder, rename.

Memory: tensors pass in blocks; what all workers hold together stays within the budget, however large the checkpoint. A
conversion that was stopped goes on from the files that it finished: Note [Restart] in workspace.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil
import torch

from ourshard.runtime.wording import file_text, memory_text

from . import view
from .commit import put_in_place, refuse_others
from .companions import strangers
from .io import DISK, DiskIO
from .merge import merge_adapter as merged
from .registry import writer
from .sink import Sink, SinkOptions
from .source import Source, detect
from .workspace import Workspace

_LOCAL = "only the ranks and the layout that saved it can read it"
MIN_BUDGET = 16 << 20
_UNITS = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


class Progress(Protocol):
    """What shows how far a conversion is."""

    def start(self, nbytes: int) -> None:
        """Say how many bytes of tensors there are to write."""

    def advance(self, nbytes: int) -> None:
        """Say that so many more are done."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did, or would do (`dry_run`)."""

    source_format: str
    path: Path
    format: str
    tensors: int
    nbytes: int
    losses: tuple[str, ...]  # what the result does not hold, one sentence each
    seconds: float


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors are taken, under which names, in which dtype."""

    dtype: str | torch.dtype | None = None
    weights_only: bool = False
    adapters_only: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    ties: Mapping[str, str] | None = None
    merge_adapter: bool = False
    base: Path | None = None
    model: int | None = None

    def __post_init__(self) -> None:
        if self.merge_adapter and self.adapters_only:
            raise ValueError("merge_adapter and adapters_only exclude each other: after merging there is no adapter")
        if self.base is not None and not self.merge_adapter:
            raise ValueError(
                "base is the model that an adapter is merged into: give merge_adapter (--merge-adapter) too"
            )

    def open(self, src: Path) -> Source:
        """Open the checkpoint, at the model that is chosen. What is read of it is checked, where it has hashes."""
        source = detect(src, model=self.model)
        source.check_reads()
        return source

    def of(self, source: Source) -> Source:
        """Return the source as it is to be written."""
        if self.merge_adapter:
            base = detect(self.base) if self.base is not None else None
            if base is not None:
                base.check_reads()
            source = merged(source, base)
        if self.ties:
            source = view.with_ties(source, self.ties)
        if self.weights_only:
            source = view.without_training(source)
        if (self.adapters_only or self.include or self.exclude or self.rename) and view.has_local(source):
            source = view.without_optimizer(source, f"{_LOCAL}, with all parameters under the names they have there")
        if self.adapters_only:
            source = view.only_adapters(source)
        if self.include or self.exclude:
            view.check_patterns(source, (*self.include, *self.exclude))
            source = view.select(source, view.by_patterns(self.include, self.exclude))
        if self.rename:
            source = view.rename(source, self.rename)
        return view.cast(source, self.dtype)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    dtype: str | torch.dtype | None = None,
    weights_only: bool = False,
    adapters_only: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    max_shard_size: str | int | None = None,
    world_size: int | None = None,
    memory: str | int = "2GiB",
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    merge_adapter: bool = False,
    base: str | Path | None = None,
    model: int | None = None,
    progress: Progress | None = None,
    io: DiskIO = DISK,
) -> Report:
    """Convert the checkpoint `src` (any format, found out) to the new folder `dst` in the format `to`.

    dtype: of floating weights; "own" takes each parameter's dtype in the model, None keeps what is stored (the fp32
        masters, where there are any). Buffers and the optimizer's state keep theirs.
    weights_only, adapters_only: leave the optimizer out; take only the adapter.
    include, exclude: shell globs over names. rename: "REGEX=REPLACEMENT" rules. ties: alias -> owner.
    max_shard_size: bytes or "5GB", for formats with files of weights; world_size: ranks, for formats cut by rank.
    memory: the resident set of this process stays below it, plus the largest row that has to be held whole.
    merge_adapter: add a LoRA to its base weights, which are in `src` or in the checkpoint `base`.
    model: which one, where `src` holds several (accelerate numbers them from 0).
    overwrite: replace the checkpoint `dst` when the new one is finished; nothing else is. dry_run: write nothing.

    Raises FileExistsError, FileNotFoundError, ValueError for what was asked, CheckpointError for a bad `src`, OSError
    for the disk. If it is stopped, the same call goes on where it was.
    """
    selection = Selection(
        dtype, weights_only, adapters_only, tuple(include), tuple(exclude), tuple(rename), ties, merge_adapter,
        Path(base) if base is not None else None, model,
    )  # fmt: skip
    options = SinkOptions(None if max_shard_size is None else parse_size(max_shard_size), world_size)
    src, dst, workers = Path(src), Path(dst), _threads(workers)
    sink = writer(to)(options)
    began = time.monotonic()
    with selection.open(src) as opened, _for_sink(selection.of(opened), sink) as source:
        _check_place(src, dst, overwrite=overwrite)
        report = _plan(source, src, dst, sink)
        if not dry_run:
            temporary = dst.with_name(f".{dst.name}.converting")
            budget, mark = _budget(parse_size(memory)), _fingerprint(src, selection, to, options)
            _check_space(temporary, report.nbytes)
            advance = _start(progress, report.nbytes)
            with Workspace(temporary, mark, budget=budget, workers=workers, io=io, progress=advance) as workspace:
                _fill(workspace, sink, source)
                put_in_place(temporary, dst, replace=overwrite, io=io)
                workspace.forget()
    return replace(report, seconds=time.monotonic() - began)


def _threads(workers: int | None) -> int:
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}: it has to be 1 or more")
    return workers or min(4, os.cpu_count() or 1)


def _start(progress: Progress | None, nbytes: int) -> Callable[[int], None] | None:
    """Say how many bytes there are; return what is to be told of those that are done."""
    if progress is None:
        return None
    progress.start(nbytes)
    return progress.advance


def _for_sink(source: Source, sink: Sink) -> Source:
    """Leave out an optimizer of which the format can't hold all state, rather than write a part of it."""
    if all(sink.can_hold(key.kind) for key in source.tensors if key.is_local):
        return source
    return view.without_optimizer(source, f"{_LOCAL}; its weights are all here")


def parse_size(size: str | int) -> int:
    """Return the bytes of "2GiB", "500MB" or a number; GB is 1000**3, GiB 1024**3."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{size!r} is no size: write bytes, 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _plan(source: Source, src: Path, dst: Path, sink: Sink) -> Report:
    held = [info for key, info in source.tensors.items() if sink.can_hold(key.kind)]
    if not held:
        raise ValueError(f"nothing of {src} can be held by the format {sink.format}")
    nbytes = sum(info.nbytes for info in held)
    _check_ranks(sink.options.world_size, nbytes)
    return Report(
        source_format=source.format,
        path=dst,
        format=sink.format,
        tensors=len(held),
        nbytes=nbytes,
        losses=(*source.description.losses, *source.description.beside, *sink.losses(source)),
        seconds=0.0,
    )


_MANY_RANKS = 1024  # that are no slip, whatever they hold
_LEAST_EACH = 2**20  # bytes, where there are more


def _check_ranks(ranks: int | None, nbytes: int) -> None:
    """Refuse to cut a checkpoint for so many ranks that a file of each is next to empty: a slip of the keyboard."""
    if ranks is not None and ranks > _MANY_RANKS and nbytes // ranks < _LEAST_EACH:
        raise ValueError(
            f"world_size is {ranks}: each of so many ranks would get {file_text(nbytes / ranks)} of "
            f"{file_text(nbytes)}. What is cut for fewer loads on any number of ranks: give at most {_MANY_RANKS}, or "
            "leave it out"
        )


def _fill(workspace: Workspace, sink: Sink, source: Source) -> None:
    """Write all; leave the folder for another run if it was stopped, but not if that would fail in the same way."""
    try:
        sink.write(source, workspace)
        workspace.finish()
    except ValueError:
        workspace.discard()
        raise


def _check_place(src: Path, dst: Path, *, overwrite: bool) -> None:
    here, there = src.resolve(), dst.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"{dst} lies in {src} or holds it: a checkpoint is not converted in place")
    if dst.exists() and not overwrite:
        raise FileExistsError(f"{dst} exists; choose another folder, or overwrite it with overwrite=True (--overwrite)")
    if dst.exists() and not dst.is_dir():
        raise ValueError(f"{dst} is a file: the result is a folder")
    if dst.exists() and not dst.is_symlink():
        refuse_others(dst, strangers(dst))


def _check_space(temporary: Path, nbytes: int) -> None:
    """Raise OSError if the disk has no room for the result, of which a stopped run may have written a part."""
    folder = next(parent for parent in temporary.resolve().parents if parent.exists())
    free = shutil.disk_usage(folder).free + sum(size for _, size, _ in _files(temporary))
    if free < nbytes:
        raise OSError(f"{folder} has {file_text(free)} left, the result needs {file_text(nbytes)}")


def _budget(memory: int) -> int:
    """Return what blocks may take: a third of what is left, since a cast holds a block twice and malloc keeps some."""
    taken = psutil.Process().memory_info().rss
    budget = (memory - taken) // 3
    if budget < MIN_BUDGET:
        need = memory_text(taken + 3 * MIN_BUDGET)
        raise ValueError(f"memory of {memory_text(memory)} is too little: this process needs {need} to begin with")
    return budget


def _fingerprint(src: Path, selection: Selection, to: str, options: SinkOptions) -> str:
    """Return a hash of what makes the result: the files of the source (names, lengths, times) and the options."""
    files = [list(_files(src))]
    if selection.base is not None:
        files.append(list(_files(selection.base)))
    text = json.dumps([str(src.resolve()), files, repr(selection), to, repr(options)])
    return hashlib.sha256(text.encode()).hexdigest()


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            status = file.stat()
            yield str(file.relative_to(path)), status.st_size, status.st_mtime_ns
