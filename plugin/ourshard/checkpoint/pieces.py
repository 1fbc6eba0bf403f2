"""Tensors that lie in pieces of whole rows in several files: find the pieces, read only the bytes of the rows wanted."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from .source import CheckpointError, TensorInfo

HASH_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a tensor at a position in a file (0-d: rows 0:1). `digest` is "" if there is no hash."""

    file: str
    start: int
    stop: int
    begin: int
    nbytes: int
    digest: str = ""


class FilePool:
    """Files of a folder open for reading by position; the least used are closed when there are too many."""

    def __init__(self, folder: Path, limit: int = 64) -> None:
        self.folder = folder
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
                try:
                    descriptor = os.open(self.folder / name, os.O_RDONLY)
                except FileNotFoundError as error:
                    raise CheckpointError(f"{self.folder / name} is missing") from error
            self._open[name] = descriptor
            return os.dup(descriptor)


def missing_rows(info: TensorInfo, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the ranges of rows that no piece covers; `pieces` sorted by start."""
    gaps, position = [], 0
    for piece in pieces:
        if piece.start > position:
            gaps.append((position, piece.start))
        position = max(position, piece.stop)
    if position < info.rows and info.numel:
        gaps.append((position, info.rows))
    return gaps


def overlapping(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces that hold any of these rows; `pieces` sorted by start and disjoint."""
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    for piece in pieces[first:]:
        if piece.start >= stop:
            return
        if piece.stop > start:
            yield piece


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_rows(pool: FilePool, info: TensorInfo, pieces: Sequence[Piece], start: int, stop: int) -> torch.Tensor:
    """Read rows [start, stop) into a new tensor; raise CheckpointError naming the rows if a piece is missing."""
    result = torch.empty(info.shape_of(start, stop), dtype=info.dtype)
    if result.numel() == 0:
        return result
    target, position = bytes_of(result), start
    for piece in overlapping(pieces, start, stop):
        if piece.start > position:
            break
        upto = min(stop, piece.stop)
        begin = piece.begin + (position - piece.start) * info.row_nbytes
        pool.read_into(
            piece.file, begin, target[(position - start) * info.row_nbytes : (upto - start) * info.row_nbytes]
        )
        position = upto
    if position < stop:
        raise CheckpointError(f"{info.key}: rows {position}:{stop} are in no file of {pool.folder}")
    return result


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
