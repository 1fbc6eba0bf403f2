"""Tensors that lie in pieces in several files: find the pieces, read only the bytes asked for.

Note [Runs and boxes]
A rank holds a run of a tensor: consecutive elements [start, stop) in row-major order. Pieces are kept as runs, since
overlaps of runs are plain intervals. In a safetensors file a piece has a shape, so it has to be a box as well: a range
in one dimension, one index in each dimension before it, all of each after it. Whole rows are one box; a run that is
cut below the rows is several, each its own piece.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from .source import CheckpointError, TensorInfo
from .tensor_bytes import bytes_of

HASH_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a tensor at a position in a file. `digest` is "" if there is no hash."""

    file: str
    start: int
    stop: int
    begin: int
    nbytes: int
    digest: str = ""


class FilePool:
    """Files of a folder open for reading by position; the least used are closed when there are too many.

    `sizes`: the bytes that each file is known to have; one that has not is refused when it is opened.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int] | None = None, limit: int = 64) -> None:
        self.folder = folder
        self._sizes = sizes or {}
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        """Fill `target` from this position; raise CheckpointError if the file is too short."""
        # A descriptor of its own for this call: another thread may close the pooled one at any time.
        descriptor = self._duplicate(name)
        try:
            while target.nbytes:
                got = os.preadv(descriptor, [target], begin)
                if got == 0:
                    raise CheckpointError(f"{self.folder / name} is cut off: no bytes at {begin}")
                target, begin = target[got:], begin + got
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def _duplicate(self, name: str) -> int:
        with self._lock:
            descriptor = self._open.pop(name, None)
            if descriptor is None:
                if len(self._open) >= self._limit:
                    os.close(self._open.popitem(last=False)[1])
                descriptor = self._open_checked(name)
            self._open[name] = descriptor
            return os.dup(descriptor)

    def _open_checked(self, name: str) -> int:
        path, expected = self.folder / name, self._sizes.get(name)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        length = os.fstat(descriptor).st_size
        if expected is not None and length != expected:
            os.close(descriptor)
            raise CheckpointError(f"{path} is cut off or damaged: it has {length} bytes, written were {expected}")
        return descriptor


def box_of(shape: tuple[int, ...], start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (starts, sizes) of the box that the elements [start, stop) are; ValueError if they are several.

    An empty run is the whole of a tensor without elements.
    """
    if start == stop:
        return (0,) * len(shape), shape
    run = f"elements {start}:{stop} of shape {shape}"
    starts, sizes = [], []
    inner = math.prod(shape)
    for length in shape:
        inner //= length
        index, offset = divmod(start, inner)
        if index == (stop - 1) // inner:
            starts.append(index)
            sizes.append(1)
            start, stop = offset, offset + stop - start
            continue
        if offset or stop % inner:
            raise ValueError(f"{run} are no box")
        starts.append(index)
        sizes.append(stop // inner - index)
        start, stop = 0, inner
    return tuple(starts), tuple(sizes)


def run_of(shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the elements [start, stop) that a box of the whole `shape` covers; ValueError if they are no run."""
    inside = len(shape) == len(starts) == len(sizes) and all(
        start >= 0 and size >= 0 and start + size <= length
        for length, start, size in zip(shape, starts, sizes, strict=True)
    )
    cut = [size < length for length, size in zip(shape, sizes, strict=False)]
    below = next((dim for dim in reversed(range(len(cut))) if cut[dim]), 0)  # the dimension with the range
    if not inside or any(size != 1 for size in sizes[:below]):
        raise ValueError(f"a box of {sizes} at {starts} is no run of elements of shape {shape}")
    start = 0
    for length, offset in zip(shape, starts, strict=True):
        start = start * length + offset
    return start, start + math.prod(sizes)


def gaps_of(info: TensorInfo, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the runs of elements that no piece covers; `pieces` sorted by start."""
    gaps, position = [], 0
    for piece in pieces:
        if piece.start > position:
            gaps.append((position, piece.start))
        position = max(position, piece.stop)
    if position < info.numel:
        gaps.append((position, info.numel))
    return gaps


def where(info: TensorInfo, start: int, stop: int) -> str:
    """Name a run for a message: by rows if it is whole rows, else by elements."""
    row = info.row_numel
    if row and info.shape and start % row == 0 and stop % row == 0:
        return f"rows {start // row}:{stop // row}"
    return f"elements {start}:{stop}"


def overlapping(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces that hold any of these elements; `pieces` sorted by start and disjoint."""
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    for piece in pieces[first:]:
        if piece.start >= stop:
            return
        if piece.stop > start:
            yield piece


def read_run(pool: FilePool, info: TensorInfo, pieces: Sequence[Piece], start: int, stop: int) -> torch.Tensor:
    """Read elements [start, stop) into a new 1-d tensor; raise CheckpointError naming those that are missing."""
    spans = _spans(pool, info, pieces, start, stop)
    result = torch.empty(stop - start, dtype=info.dtype, device="cpu")  # no sooner: a shape alone proves no bytes
    _read_spans(pool, info, spans, start, bytes_of(result))
    return result


def read_run_into(pool: FilePool, info: TensorInfo, pieces: Sequence[Piece], start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of the elements from `start` on; raise CheckpointError naming those missing."""
    stop = start + target.nbytes // info.dtype.itemsize
    _read_spans(pool, info, _spans(pool, info, pieces, start, stop), start, target)


def _spans(
    pool: FilePool, info: TensorInfo, pieces: Sequence[Piece], start: int, stop: int
) -> list[tuple[Piece, int, int]]:
    """Return which elements to read of which piece."""
    spans, position = [], start
    for piece in overlapping(pieces, start, stop):
        if piece.start > position:
            break
        upto = min(stop, piece.stop)
        spans.append((piece, position, upto))
        position = upto
    if position < stop:
        raise CheckpointError(f"{info.key}: {where(info, position, stop)} are in no file of {pool.folder}")
    return spans


def _read_spans(
    pool: FilePool, info: TensorInfo, spans: Sequence[tuple[Piece, int, int]], start: int, target: memoryview
) -> None:
    width = info.dtype.itemsize
    for piece, first, last in spans:
        begin = piece.begin + (first - piece.start) * width
        try:
            pool.read_into(piece.file, begin, target[(first - start) * width : (last - start) * width])
        except CheckpointError as error:
            raise CheckpointError(f"{info.key}: {where(info, first, last)} cannot be read: {error}") from error


def read_rows(pool: FilePool, info: TensorInfo, pieces: Sequence[Piece], start: int, stop: int) -> torch.Tensor:
    """Read rows [start, stop) into a new tensor of their shape."""
    row = info.row_numel
    return read_run(pool, info, pieces, start * row, stop * row).reshape(info.shape_of(start, stop))


def digest_of(pool: FilePool, name: str, begin: int, nbytes: int) -> str:
    """Return the xxh3_128 of these bytes of a file, read in blocks."""
    state = xxhash.xxh3_128()
    block = memoryview(bytearray(min(HASH_BLOCK, nbytes)))
    while nbytes:
        part = block[: min(nbytes, HASH_BLOCK)]
        pool.read_into(name, begin, part)
        state.update(part)
        begin, nbytes = begin + part.nbytes, nbytes - part.nbytes
    return state.hexdigest()
