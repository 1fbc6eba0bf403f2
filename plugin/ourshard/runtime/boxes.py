"""Describe a run of consecutive elements of a tensor as boxes: what a checkpoint can name and a reader can slice.

Pure Python. Whole rows of a matrix are one box. Where a layout cuts a tensor of more dimensions below its first one
(`fine_granules` in `layout.py`), a rank's part is the tail of one row, whole rows, and the head of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ourshard.runtime.layout import LaneTensor, RowRange


@dataclass(frozen=True, slots=True)
class Box:
    """The elements [starts[d], starts[d] + sizes[d]) of each dimension; they lie in a row at `offset` of the shard."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of(shape: tuple[int, ...], tensor: LaneTensor, rows: RowRange) -> tuple[Box, ...]:
    """Return the boxes that `rows` of `tensor`, whole shape `shape`, cover, in the order of their elements."""
    if math.prod(shape) != tensor.numel:
        raise ValueError(f"shape {shape} has {math.prod(shape)} elements; the tensor in the lane has {tensor.numel}")
    if rows.rows == 0:
        return ()
    first, last = rows.start * tensor.granule, rows.stop * tensor.granule
    found: list[Box] = []
    offset = rows.offset
    for starts, sizes in _boxes(shape, first, last):
        found.append(Box(starts, sizes, offset))
        offset += found[-1].numel
    return tuple(found)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (starts, sizes) of the boxes that make up the elements [start, stop) of a row-major `shape`."""
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, inside = divmod(start, inner)
        if inside == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * inner
            continue
        part = min(stop - start, inner - inside)
        for starts, sizes in _boxes(shape[1:], inside, inside + part):
            yield (row, *starts), (1, *sizes)
        start += part
