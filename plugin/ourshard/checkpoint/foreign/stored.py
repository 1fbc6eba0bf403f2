"""Where tensors lie in files, and reading rows of them: `StoredTensor`, `FlatTensor`. `ChunkedTensor`: chunked.py.

All of them read into a buffer of just the rows asked for; nothing is mapped or cached, no file stays open, and all
may be called from several threads.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..source import CheckpointError
from .classes import PickledTensor, StorageId

_SPAN_NBYTES = 8 << 20  # strided rows are cut out of a span of the file up to this, else gathered run by run
_CHECK_NBYTES = 1 << 20


@runtime_checkable
class Readable(Protocol):
    """A tensor whose rows can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the whole shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the stored dtype."""

    def read(self, start_row: int, stop_row: int, check: bool = True) -> torch.Tensor:
        """Return these rows, contiguous and owned; a 0-d tensor has one row. `check`: test checksums first."""


@runtime_checkable
class Fillable(Readable, Protocol):
    """A tensor that can be read into memory that is there, where its elements lie in the files as in the tensor."""

    def fill(self, start: int, target: memoryview) -> bool:
        """Fill `target` with the bytes of the elements from `start` on, checksums tested; False: not possible here."""


def read_into(path: Path, start: int, view: memoryview) -> None:
    """Fill `view` with the bytes of the file from `start` on; raise CheckpointError if it ends before."""
    done, total = 0, len(view)
    if not 0 <= start < 1 << 63:
        raise CheckpointError(f"{path}: a record in it points to byte {start}")
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while done < total:
            got = file.readinto(view[done:])
            if not got:
                raise CheckpointError(f"{path}: ends at byte {start + done}, where {total - done} more were expected")
            done += got


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(slots=True)
class Bytes:
    """A stretch of a file with its checksum, which is checked before the first read."""

    path: Path
    start: int
    nbytes: int
    crc: int | None
    label: str
    checked: bool = field(default=False, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def check(self) -> None:
        """Compare the bytes with their CRC-32, once; raise CheckpointError. Other threads wait for the result."""
        with self.lock:
            if not self.checked and self.crc is not None and self._computed_crc() != self.crc:
                raise CheckpointError(f"{self.label} is damaged: its checksum differs")
            self.checked = True

    def _computed_crc(self) -> int:
        crc, buffer = 0, bytearray(min(_CHECK_NBYTES, self.nbytes))
        for begin in range(0, self.nbytes, _CHECK_NBYTES):
            view = memoryview(buffer)[: min(_CHECK_NBYTES, self.nbytes - begin)]
            read_into(self.path, self.start + begin, view)
            crc = zlib.crc32(view, crc)
        return crc

    def read_into(self, start: int, view: memoryview, check: bool) -> None:
        """Fill `view` from byte `start` of the stretch on, with the checksum tested first if `check`."""
        assert 0 <= start <= self.nbytes - len(view), "a read beyond its stretch"
        if check:
            self.check()
        read_into(self.path, self.start + start, view)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of one torch.save file, whatever its strides."""

    tensor: PickledTensor
    content: Bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the whole shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the stored dtype."""
        return self.tensor.dtype

    def read(self, start_row: int, stop_row: int, check: bool = True) -> torch.Tensor:
        """Return these rows, contiguous and owned."""
        tensor = self.tensor
        shape = (stop_row - start_row, *tensor.shape[1:]) if tensor.shape else ()
        if 0 in shape:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu")
        first = tensor.offset + (start_row * tensor.stride[0] if shape else 0)
        if tensor.is_contiguous:
            return self._run(first, math.prod(shape), check).reshape(shape)
        rows = self._read_strided(first, shape, check)
        if "conj" in tensor.views:
            rows = rows.conj().resolve_conj()
        return rows.neg() if "neg" in tensor.views else rows

    def fill(self, start: int, target: memoryview) -> bool:
        """Fill `target` with the bytes of the elements from `start` on, unless the strides are odd."""
        if self.tensor.is_contiguous:
            self.content.read_into((self.tensor.offset + start) * self.dtype.itemsize, target, True)
        return self.tensor.is_contiguous

    def _run(self, first: int, numel: int, check: bool) -> torch.Tensor:
        """Return a run of elements of the storage."""
        result = torch.empty(numel, dtype=self.dtype, device="cpu")
        self.content.read_into(first * self.dtype.itemsize, bytes_of(result), check)
        return result

    def _read_strided(self, first: int, shape: tuple[int, ...], check: bool) -> torch.Tensor:
        stride = self.tensor.stride
        span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
        if span * self.dtype.itemsize > _SPAN_NBYTES and _is_dense(self.tensor, order):
            return self._gather(first, shape, order, check)
        if span > 8 * math.prod(shape) and span * self.dtype.itemsize > _SPAN_NBYTES:
            raise CheckpointError(
                f"{self.content.label}: a tensor of shape {self.shape} with strides {stride} is not read"
            )
        return self._run(first, span, check).as_strided(shape, stride).clone(memory_format=torch.contiguous_format)

    def _gather(self, first: int, shape: tuple[int, ...], order: Sequence[int], check: bool) -> torch.Tensor:
        """Read the rows of a tensor whose dimensions lie in another order (column-major, channels last), run by run."""
        outer, inner = order[: order.index(0)], order[order.index(0) :]
        run = math.prod(shape[dim] for dim in inner)
        result = torch.empty((math.prod(shape[dim] for dim in outer), run), dtype=self.dtype, device="cpu")
        for place, index in enumerate(itertools.product(*(range(shape[dim]) for dim in outer))):
            begin = first + sum(i * self.tensor.stride[dim] for i, dim in zip(index, outer, strict=True))
            self.content.read_into(begin * self.dtype.itemsize, bytes_of(result[place]), check)
        back = [order.index(dim) for dim in range(len(shape))]
        return result.reshape([shape[dim] for dim in order]).permute(back).contiguous()


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, content: Bytes) -> StoredTensor:
    """Return the reader of a tensor that fills a stretch of a file, as in safetensors."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.insert(0, step)
        step *= length
    storage = StorageId("", dtype, math.prod(shape))
    return StoredTensor(PickledTensor(storage, 0, shape, tuple(stride), dtype), content)


def _is_dense(tensor: PickledTensor, order: Sequence[int]) -> bool:
    """Tell whether the elements fill their span once when the dimensions are taken in this order."""
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride[dim] != expected:
            return False
        expected *= tensor.shape[dim]
    return True


@dataclass(frozen=True, slots=True)
class Run:
    """`numel` elements of a flat tensor from `begin` on, which lie in `stored` from `offset` on."""

    begin: int
    numel: int
    stored: StoredTensor
    offset: int


class FlatTensor:
    """A tensor in row-major order, cut at any elements into runs (as DeepSpeed cuts)."""

    def __init__(self, shape: tuple[int, ...], runs: Iterable[Run], label: str) -> None:
        self.shape = shape
        self.runs = sorted((run for run in runs if run.numel), key=lambda run: run.begin)
        self.dtype = self._check(math.prod(shape), label)
        self.pieces = len(self.runs)
        self._begins = [run.begin for run in self.runs]

    def _check(self, numel: int, label: str) -> torch.dtype:
        reached = 0
        for run in self.runs:
            if run.begin != reached:
                what = "is missing" if run.begin > reached else "is there twice"
                raise CheckpointError(f"{label}: element {min(reached, run.begin)} {what} in the files")
            if not run.stored.tensor.is_contiguous:
                raise CheckpointError(
                    f"{label}: {run.stored.content.label} is not contiguous, as a flat buffer has to be"
                )
            if run.offset < 0 or run.offset + run.numel > run.stored.tensor.numel:
                raise CheckpointError(f"{label}: lies beyond the end of {run.stored.content.label}")
            reached += run.numel
        if reached != numel:
            raise CheckpointError(f"{label}: {reached} of {numel} elements are in the files")
        dtypes = {run.stored.dtype for run in self.runs}
        if len(dtypes) > 1:
            raise CheckpointError(f"{label}: its pieces have different dtypes: {sorted(map(str, dtypes))}")
        return dtypes.pop() if dtypes else torch.float32

    def read(self, start_row: int, stop_row: int, check: bool = True) -> torch.Tensor:
        """Return these rows, contiguous and owned."""
        shape = (stop_row - start_row, *self.shape[1:]) if self.shape else ()
        begin = start_row * math.prod(self.shape[1:])
        return self.read_flat(begin, begin + math.prod(shape), check).view(shape)

    def read_flat(self, begin: int, end: int, check: bool = True) -> torch.Tensor:
        """Return elements of the flattened tensor."""
        flat = torch.empty(end - begin, dtype=self.dtype, device="cpu")
        self._fill(begin, bytes_of(flat), check)
        return flat

    def fill(self, start: int, target: memoryview) -> bool:
        """Fill `target` with the bytes of the elements from `start` on."""
        self._fill(start, target, True)
        return True

    def _fill(self, begin: int, target: memoryview, check: bool) -> None:
        width = self.dtype.itemsize
        end = begin + target.nbytes // width
        for run in self.runs[max(0, bisect.bisect_right(self._begins, begin) - 1) :]:
            if run.begin >= end:
                break
            low, high = max(begin, run.begin), min(end, run.begin + run.numel)
            if low < high:
                place = run.stored.tensor.offset + run.offset + low - run.begin
                part = target[(low - begin) * width : (high - begin) * width]
                run.stored.content.read_into(place * width, part, check)
