"""Where the values of a parameter are, when they are not in memory: rows are read from there when they are needed.

A `Source` knows the shape and dtype of a tensor, and gives any run of its elements. Files are the leaves; casts, cuts
and joins of sources are sources, so that a fused or transposed weight of a checkpoint needs no memory before it is
used either. A source never changes: what is derived from one stays right whatever happens to the tensor it was for.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

BLOCK = 2**19  # elements that are read at a time
_MAPPED_FROM = 2**20  # bytes

# Bytes that this process has read through sources, for tests and benchmarks.
_bytes_read = 0


def bytes_read() -> int:
    """Return how many bytes this process has read from files through sources."""
    return _bytes_read


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory goes back to the system when they are dropped.

    The allocator of the C library keeps what it was given in pieces of this size: after the temporaries of a 400 MB
    model, 426 MB stayed with the process.
    """
    numel = math.prod(shape)
    if numel * dtype.itemsize < _MAPPED_FROM:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype).view(tuple(shape))


class Source(ABC):
    """The values of one tensor of `shape` and `dtype`, in row-major order."""

    in_pieces = True  # reading in pieces costs no more than reading at once

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) as a flat tensor on the CPU, which belongs to the caller."""

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, contiguous, on the CPU."""
        return self.read(0, self.numel).view(self.shape)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (offset from `start`, values) that cover elements [start, stop), in pieces where that costs nothing."""
        step = BLOCK if self.in_pieces else max(stop - start, 1)
        for first in range(start, stop, step):
            yield first - start, self.read(first, min(first + step, stop))


class FileSource(Source):
    """A tensor whose elements lie one after the other in a file, from byte `begin` on."""

    def __init__(self, path: Path, begin: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.path = path
        self.begin = begin

    def read(self, start: int, stop: int) -> torch.Tensor:
        global _bytes_read
        found = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        if stop == start:
            return found
        buffer = memoryview(found.view(torch.uint8).numpy())  # type: ignore[arg-type]
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin + start * self.dtype.itemsize)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise OSError(f"{self.path} ends before byte {self.begin + stop * self.dtype.itemsize}.")
                done += count
        _bytes_read += len(buffer)
        return found


class TensorSource(Source):
    """A tensor that exists: mapped from a file, or small. It must not be changed afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        global _bytes_read
        _bytes_read += (stop - start) * self.dtype.itemsize
        return self._tensor.reshape(-1)[start:stop].clone()


class Constant(Source):
    """A tensor of one value."""

    def __init__(self, value: float, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._value = value

    def read(self, start: int, stop: int) -> torch.Tensor:
        values = scratch((stop - start,), self.dtype)
        return values.fill_(self._value) if self._value else values


class Cast(Source):
    """Another source in another dtype."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        super().__init__(source.shape, dtype)
        self._source = source
        self.in_pieces = source.in_pieces

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._source.read(start, stop).to(self.dtype)


class Reshaped(Source):
    """Another source in another shape of as many elements."""

    def __init__(self, source: Source, shape: Sequence[int]) -> None:
        super().__init__(shape, source.dtype)
        assert self.numel == source.numel
        self._source = source
        self.in_pieces = source.in_pieces

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._source.read(start, stop)


class Joined(Source):
    """Sources of one dtype joined along `dim`, as `torch.cat` does."""

    def __init__(self, parts: Sequence[Source], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype)
        self._parts = list(parts)
        self.in_pieces = all(part.in_pieces for part in parts)
        self._runs = [math.prod(part.shape[dim:]) for part in parts]  # elements of each part in one row of the whole

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        period = sum(self._runs)
        for row in range(start // period, -(-stop // period)) if stop > start else ():
            begin = row * period
            for part, run in zip(self._parts, self._runs, strict=True):
                first, last = max(begin, start), min(begin + run, stop)
                if first < last:
                    offset = row * run - begin
                    found[first - start : last - start] = part.read(first + offset, last + offset)
                begin += run
        return found


class Sliced(Source):
    """The part [start, stop) of another source along `dim`, as `torch.narrow` gives it."""

    def __init__(self, source: Source, dim: int, start: int, stop: int) -> None:
        shape = list(source.shape)
        shape[dim] = stop - start
        super().__init__(shape, source.dtype)
        self._source = source
        self.in_pieces = source.in_pieces
        inner = math.prod(source.shape[dim + 1 :])
        self._run = (stop - start) * inner  # elements of a row that are in the part
        self._period = source.shape[dim] * inner
        self._offset = start * inner

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        for row in range(start // self._run, -(-stop // self._run)) if stop > start else ():
            first, last = max(row * self._run, start), min((row + 1) * self._run, stop)
            offset = row * (self._period - self._run) + self._offset
            found[first - start : last - start] = self._source.read(first + offset, last + offset)
        return found


class Computed(Source):
    """What a function makes of whole tensors; the function runs again for each read."""

    in_pieces = False

    def __init__(
        self, function: Callable[..., torch.Tensor], sources: Sequence[Source], shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        self._function = function
        self._sources = list(sources)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.whole().reshape(-1)[start:stop].clone()

    def whole(self) -> torch.Tensor:
        with torch.no_grad():
            return self._function(*(source.whole() for source in self._sources)).contiguous()


class Drawn(Source):
    """What a function that writes in place makes of a tensor, with random numbers from `state`.

    `state` is the state of the CPU's default generator when the function was called; it is put back after each read,
    so that reading draws nothing.
    """

    in_pieces = False

    def __init__(self, source: Source, function: Callable[[torch.Tensor], Any], state: torch.Tensor | None) -> None:
        super().__init__(source.shape, source.dtype)
        self._source = source
        self._function = function
        self._state = state

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.whole().reshape(-1)[start:stop].clone()

    def whole(self) -> torch.Tensor:
        value = self._source.whole()
        before = torch.get_rng_state()
        try:
            if self._state is not None:
                torch.set_rng_state(self._state)
            with torch.no_grad():
                self._function(value)
        finally:
            torch.set_rng_state(before)
        return value
