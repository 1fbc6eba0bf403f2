"""Move tensors from a source into a safetensors file: in blocks, in parallel, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from .safetensors_file import Layout
from .source import Source, TensorInfo
from .workspace import PositionedFile, Workspace


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Elements [start, stop) of a tensor, to be written as one piece: Note [Runs and boxes] in pieces.py."""

    info: TensorInfo
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Count the bytes."""
        return (self.stop - self.start) * self.info.dtype.itemsize


def whole(info: TensorInfo) -> TensorRun:
    """Return all of a tensor as a run."""
    return TensorRun(info, 0, info.numel)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A safetensors file to be written: `runs` in the order of the layout's entries."""

    name: str
    layout: Layout
    runs: Sequence[TensorRun]


def write_files(workspace: Workspace, plans: Sequence[FilePlan], source: Source) -> None:
    """Write these files, unless they are finished, and note the hash of each run in the journal.

    Workers take a file each where there are enough; two that write into one file wait for each other.
    """
    for plan in plans:
        if workspace.finished(plan.name):
            workspace.report(sum(run.nbytes for run in plan.runs))
    missing = [plan for plan in plans if not workspace.finished(plan.name)]
    if len(missing) < workspace.workers:
        for plan in missing:
            _write_file(workspace, plan, source, workspace.map)
    else:
        workspace.map(lambda plan: _write_file(workspace, plan, source, _map_here), missing)


def _map_here(function: Callable[[Any], list[str]], items: Iterable[Any]) -> list[list[str]]:
    return [function(item) for item in items]


def _write_file(workspace: Workspace, plan: FilePlan, source: Source, run_all: Callable[..., list[list[str]]]) -> None:
    with workspace.create_positioned(plan.name, plan.layout.nbytes) as file:
        file.write_at(0, [plan.layout.head])
        writer = _Writer(workspace, file, source)
        digests = run_all(writer.write, list(_batches(plan.layout, plan.runs, workspace.block_nbytes)))
        file.digests = tuple(digest for batch in digests for digest in batch)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Runs that follow each other from a position in a file."""

    position: int
    runs: tuple[TensorRun, ...]


def _batches(layout: Layout, runs: Sequence[TensorRun], block: int) -> Iterator[_Batch]:
    """Yield all runs: a large one alone, small neighbours together, up to about a block."""
    batch: list[TensorRun] = []
    begin = position = len(layout.head)
    for run in runs:
        if batch and position + run.nbytes - begin > block:
            yield _Batch(begin, tuple(batch))
            batch, begin = [], position
        batch.append(run)
        position += run.nbytes
    if batch:
        yield _Batch(begin, tuple(batch))


class _Writer:
    """Reads runs into a buffer that each worker keeps, hashes them there, and writes them from there."""

    def __init__(self, workspace: Workspace, file: PositionedFile, source: Source) -> None:
        self._workspace = workspace
        self._file = file
        self._source = source

    def write(self, batch: _Batch) -> list[str]:
        """Write a batch; return the hash of each run."""
        nbytes = sum(run.nbytes for run in batch.runs)
        if len(batch.runs) == 1 and nbytes > self._workspace.block_nbytes:
            return [self._write_large(batch.position, batch.runs[0])]
        digests, position = [], 0
        with self._workspace.buffer(nbytes) as buffer:
            for run in batch.runs:
                part = buffer[position : position + run.nbytes]
                self._read(run, run.start, part)
                digests.append(xxhash.xxh3_128_hexdigest(part))
                position += run.nbytes
            self._file.write_at(batch.position, [buffer])
        self._workspace.report(nbytes)
        return digests

    def _write_large(self, position: int, run: TensorRun) -> str:
        """Write one run in blocks of whole rows."""
        state, width = xxhash.xxh3_128(), run.info.dtype.itemsize
        row = max(1, run.info.row_numel)
        block = max(1, self._workspace.block_nbytes // (row * width)) * row
        start = run.start
        while start < run.stop:
            stop = min(run.stop, start // row * row + block)
            with self._workspace.buffer((stop - start) * width) as buffer:
                self._read(run, start, buffer)
                state.update(buffer)
                self._file.write_at(position, [buffer])
            position += (stop - start) * width
            self._workspace.report((stop - start) * width)
            start = stop
        return state.hexdigest()

    def _read(self, run: TensorRun, start: int, target: memoryview) -> None:
        if target.nbytes:
            self._source.read_run_into(run.info.key, start, target)
