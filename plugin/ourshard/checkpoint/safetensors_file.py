"""Headers of safetensors files, written before the data and read without it.

The safetensors library maps a file or writes it whole; here a header is made first, bytes follow from wherever they
are, and rows are read by position. Layout: 8 bytes of header length, JSON header, data with no gap.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .source import CheckpointError

MAX_HEADER = 100_000_000  # bytes; the library refuses more, too

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its bytes are [begin, begin + nbytes) counted from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was read and checked against the file's length."""

    entries: tuple[Entry, ...]  # in the order of their bytes
    metadata: Mapping[str, str]
    nbytes: int  # of header and its length field: where the data starts


@dataclass(frozen=True, slots=True)
class Layout:
    """A header to be written, with the entries in the order in which their bytes must follow."""

    head: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Count the bytes of the whole file."""
        return len(self.head) + sum(entry.nbytes for entry in self.entries)


def lay_out(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """Make the header for these (name, dtype, shape). Wide dtypes come first, so that each tensor lies aligned."""
    ordered = sorted(tensors, key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    spans, begin = [], 0
    for name, dtype, shape in ordered:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name}: safetensors has no dtype {dtype}; convert it first")
        nbytes = _numel(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        spans.append((name, dtype, tuple(shape), begin, nbytes))
        begin += nbytes
    if len(header) != len(ordered) + bool(metadata):
        raise ValueError("a file of safetensors cannot hold two tensors of one name")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a safetensors header of {len(text)} bytes is over the limit of {MAX_HEADER}; use more files")
    head = struct.pack("<Q", len(text)) + text
    entries = tuple(Entry(name, dtype, shape, len(head) + start, nbytes) for name, dtype, shape, start, nbytes in spans)
    return Layout(head, entries)


def read_header(path: Path) -> Header:
    """Read and check the header of a file; no byte of data is read."""
    length = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path} is cut off: {length} bytes are no safetensors file")
        (size,) = struct.unpack("<Q", prefix)
        if size > MAX_HEADER or 8 + size > length:
            raise CheckpointError(f"{path} is cut off or damaged: a header of {size} bytes in a file of {length}")
        text = file.read(size)
    return parse_header(text, length, path)


def parse_header(text: bytes, file_nbytes: int, path: Path) -> Header:
    """Check a header's JSON: known dtypes, shapes that fit their bytes, no gap, no overlap, the file's whole length."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is no table")
        metadata = header.pop("__metadata__", None) or {}
        found = [_entry(name, value, 8 + len(text)) for name, value in header.items()]
    except KeyError as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: a tensor lacks its {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: the safetensors metadata has to be text")
    entries = sorted(found, key=lambda entry: (entry.begin, entry.nbytes))
    position = 8 + len(text)
    for entry in entries:
        if entry.begin != position:
            raise CheckpointError(f"{path}: {entry.name} begins at byte {entry.begin}, expected {position}")
        position += entry.nbytes
    if position != file_nbytes:
        raise CheckpointError(f"{path} is cut off or damaged: {file_nbytes} bytes where its header needs {position}")
    return Header(tuple(entries), metadata, 8 + len(text))


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as json.loads makes it, which by itself lets the last of equal keys win."""
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} is there twice")
    return table


def _entry(name: str, value: Any, data_start: int) -> Entry:
    if not isinstance(value, dict) or not isinstance(value["dtype"], str):
        raise ValueError(f"{name}: is no description of a tensor")
    dtype = DTYPES.get(value["dtype"])
    if dtype is None:
        raise ValueError(f"{name}: dtype {value['dtype']!r} is not known")
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: shape {shape} or offsets {begin}:{end} are no sizes")
    if end - begin != _numel(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {end - begin} bytes for shape {shape} of {dtype}")
    return Entry(name, dtype, shape, data_start + begin, end - begin)


def _numel(shape: Iterable[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
