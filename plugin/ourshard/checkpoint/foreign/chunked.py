"""A tensor cut into rectangles, as DCP cuts: `ChunkedTensor`."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..source import CheckpointError
from .stored import Fillable, Readable

_MAX_COMPARED = 2_000_000


@dataclass(slots=True)
class Chunk:
    """A rectangle of a tensor; `open` gives its reader when it is first needed."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    open: Callable[[], Readable]
    opened: Readable | None = None

    def reader(self, dtype: torch.dtype, label: str) -> Readable:
        """Return the reader, checked against the rectangle that it is to fill."""
        if self.opened is None:
            opened = self.open()
            if opened.shape != self.sizes or opened.dtype != dtype:
                raise CheckpointError(
                    f"{label}: the piece at {self.offsets} is {opened.shape} {opened.dtype} where its record says "
                    f"{self.sizes} {dtype}"
                )
            self.opened = opened
        return self.opened


class ChunkedTensor:
    """A tensor cut into rectangles (as DCP cuts)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, chunks: Iterable[Chunk], label: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.label = label
        self.chunks = sorted(chunks, key=lambda chunk: chunk.offsets)
        self.pieces = len(self.chunks)
        self._check_cover()
        self._begins = [chunk.offsets[0] for chunk in self.chunks] if shape else []
        self._most_rows = max((chunk.sizes[0] for chunk in self.chunks), default=0) if shape else 0

    def _check_cover(self) -> None:
        """Raise unless the rectangles lie within the tensor, don't overlap, and leave no hole."""
        for chunk in self.chunks:
            inside = len(chunk.sizes) == len(chunk.offsets) == len(self.shape) and all(
                begin >= 0 and begin + length <= whole
                for begin, length, whole in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            )
            if not inside:
                raise CheckpointError(
                    f"{self.label}: a piece {chunk.sizes} at {chunk.offsets} of a tensor {self.shape}"
                )
        if _is_grid(self.chunks, self.shape):
            return
        left = _MAX_COMPARED
        for place, chunk in enumerate(self.chunks):
            for other in itertools.islice(self.chunks, place + 1, None):
                left -= 1
                if self.shape and other.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                    break
                if _overlap(chunk, other):
                    raise CheckpointError(f"{self.label}: the pieces at {chunk.offsets} and {other.offsets} overlap")
                if left < 0:
                    raise CheckpointError(f"{self.label}: has {len(self.chunks)} pieces that form no grid")
        held, whole = sum(math.prod(chunk.sizes) for chunk in self.chunks), math.prod(self.shape)
        if held != whole:
            raise CheckpointError(f"{self.label}: {held} of {whole} elements are in the files; a piece is missing")

    def _chunks_of(self, start_row: int, stop_row: int) -> Sequence[Chunk]:
        """Return the pieces that may have some of these rows."""
        first = bisect_right(self._begins, start_row - self._most_rows)
        return self.chunks[first : bisect_left(self._begins, stop_row)]

    def read(self, start_row: int, stop_row: int, check: bool = True) -> torch.Tensor:
        """Return these rows, contiguous and owned."""
        if not self.shape:
            return self.chunks[0].reader(self.dtype, self.label).read(0, 1, check)
        result = torch.empty((stop_row - start_row, *self.shape[1:]), dtype=self.dtype, device="cpu")
        if result.numel() == 0:
            return result
        for chunk in self._chunks_of(start_row, stop_row):
            low = max(start_row, chunk.offsets[0])
            high = min(stop_row, chunk.offsets[0] + chunk.sizes[0])
            if low >= high:
                continue
            reader = chunk.reader(self.dtype, self.label)
            rows = reader.read(low - chunk.offsets[0], high - chunk.offsets[0], check)
            if rows.shape == result.shape:
                return rows
            target = result[low - start_row : high - start_row]
            for dim, (begin, length) in enumerate(zip(chunk.offsets[1:], chunk.sizes[1:], strict=True), start=1):
                target = target.narrow(dim, begin, length)
            target.copy_(rows)
        return result

    def fill(self, start: int, target: memoryview) -> bool:
        """Fill `target` with the bytes of the elements from `start` on, if one piece of whole rows has them all."""
        row = math.prod(self.shape[1:])
        stop = start + target.nbytes // self.dtype.itemsize
        for chunk in self._chunks_of(start // row, start // row + 1) if self.shape and row else ():
            first = chunk.offsets[0] * row
            if first <= start and stop <= first + chunk.sizes[0] * row and chunk.sizes[1:] == self.shape[1:]:
                reader = chunk.reader(self.dtype, self.label)
                return isinstance(reader, Fillable) and reader.fill(start - first, target)
        return False


def _is_grid(chunks: Sequence[Chunk], shape: tuple[int, ...], dim: int = 0) -> bool:
    """Tell whether sorted rectangles fill the shape as a grid: slabs along a dimension, each filled so by itself."""
    if dim == len(shape):
        return len(chunks) == 1
    reached, first = 0, 0
    while first < len(chunks):
        begin, length = chunks[first].offsets[dim], chunks[first].sizes[dim]
        stop = first
        while stop < len(chunks) and chunks[stop].offsets[dim] == begin and chunks[stop].sizes[dim] == length:
            stop += 1
        if begin != reached or not _is_grid(chunks[first:stop], shape, dim + 1):
            return False
        reached, first = begin + length, stop
    return reached == shape[dim]


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + other_length and b < a + one_length
        for a, b, one_length, other_length in zip(one.offsets, other.offsets, one.sizes, other.sizes, strict=True)
    )
