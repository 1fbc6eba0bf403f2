"""Move tensors from a source into a safetensors file: in blocks, in parallel, within the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from .pieces import bytes_of
from .safetensors_file import Layout
from .source import Source, TensorInfo
from .workspace import PositionedFile, Workspace


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a tensor, to be written as one piece: Note [Runs and boxes] in pieces.py."""

    info: TensorInfo
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Count the bytes."""
        return (self.stop - self.start) * self.info.dtype.itemsize


def whole(info: TensorInfo) -> Run:
    """Return all of a tensor as a run."""
    return Run(info, 0, info.numel)


def write_tensors(workspace: Workspace, name: str, layout: Layout, runs: Sequence[Run], source: Source) -> None:
    """Write a file of this layout, `runs` in the order of its entries, and note the hash of each in the journal."""
    if workspace.finished(name):
        workspace.report(layout.nbytes)
        return
    with workspace.create_positioned(name, layout.nbytes) as file:
        file.write_at(0, [layout.head])
        batches = list(_batches(layout, runs, workspace.block_nbytes))
        digests = workspace.map(lambda batch: _write_batch(workspace, file, source, *batch), batches)
        file.digests = tuple(digest for batch in digests for digest in batch)
    workspace.report(len(layout.head))


def _batches(layout: Layout, runs: Sequence[Run], block: int) -> Iterator[tuple[int, list[Run]]]:
    """Yield (position in the file, runs): a large one alone, small neighbours together, up to about a block."""
    batch: list[Run] = []
    begin = position = len(layout.head)
    for run in runs:
        if batch and position + run.nbytes - begin > block:
            yield begin, batch
            batch, begin = [], position
        batch.append(run)
        position += run.nbytes
    if batch:
        yield begin, batch


def _write_batch(
    workspace: Workspace, file: PositionedFile, source: Source, position: int, batch: Sequence[Run]
) -> list[str]:
    nbytes = sum(run.nbytes for run in batch)
    if len(batch) == 1 and nbytes > workspace.block_nbytes:
        return [_write_large(workspace, file, source, position, batch[0])]
    with workspace.reserve(nbytes):
        tensors = [source.read_run(run.info.key, run.start, run.stop) for run in batch]
        buffers = [bytes_of(tensor) for tensor in tensors]
        file.write_at(position, buffers)
        digests = [xxhash.xxh3_128_hexdigest(buffer) for buffer in buffers]
    workspace.report(nbytes)
    return digests


def _write_large(workspace: Workspace, file: PositionedFile, source: Source, position: int, run: Run) -> str:
    """Write one run in blocks of whole rows."""
    state = xxhash.xxh3_128()
    row = max(1, run.info.row_numel)
    block = max(1, workspace.block_nbytes // (row * run.info.dtype.itemsize)) * row
    start = run.start
    while start < run.stop:
        stop = min(run.stop, start // row * row + block)
        with workspace.reserve((stop - start) * run.info.dtype.itemsize):
            buffer = bytes_of(source.read_run(run.info.key, start, stop))
            file.write_at(position, [buffer])
            state.update(buffer)
        position += buffer.nbytes
        workspace.report(buffer.nbytes)
        start = stop
    return state.hexdigest()
