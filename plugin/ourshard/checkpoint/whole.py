"""Files of whole tensors, written by all ranks at once: each writes its own rows where they belong.

Note [Whole files]: where a tensor's bytes lie in a safetensors file follows from names, shapes and dtypes, which all
ranks know. So nothing is gathered: rank 0 makes the files under other names, every rank writes its rows into them, and
when all have flushed, rank 0 gives the files their names. A rank holds `BLOCK` bytes at a time, whatever the model; no
collective waits for a disk. All ranks have to see the folder; where they don't, the caller gathers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ourshard.runtime.engine import Engine
from ourshard.runtime.state import check_readable, save_dtype

from .agreeing import together
from .io import DISK, DiskIO, inside
from .portions import Portion, buffers_of, portions_of
from .safetensors_file import Layout, lay_out
from .tensor_bytes import bytes_of

BLOCK = 16 << 20  # bytes on the way from a device to a file
VISIBLE_WITHIN = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file that is to be written: its name, and for each tensor in it the name there and that in the model."""

    name: str
    names: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a tensor from `start` on, 1-d, on any device; `dtype` is that of the file."""

    start: int
    values: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    writes: bool = True  # this rank, and no other


def write_by_rows(
    engine: Engine, folder: Path, files: Sequence[WholeFile], dtype: torch.dtype | None = None, io: DiskIO = DISK
) -> bool:
    """Write whole tensors from the rows of all ranks; False if not all see the folder, and nothing is left. Collective.

    Values come from the masters, in the dtype that a parameter was loaded in, or `dtype`. Names may be aliases. If a
    rank fails, all raise, and files that had these names before are as they were.
    """
    check_readable(engine)
    lead = engine.mesh.world.rank == 0
    runs = dict(_runs_of(engine, dtype))
    layouts = [_layout(file, runs) for file in files]
    paths = [_temporary(folder, file) for file in files]
    try:
        with together(engine, f"save: making {folder.name}"):
            if lead:
                for path, layout in zip(paths, layouts, strict=True):
                    _make(path, layout, io)
        if engine.control.any_of([not _see(paths)], "save: who sees the folder")[0]:
            if lead:
                _remove(paths, io)
            return False
        with together(engine, f"save: writing {folder.name}"):
            for path, file, layout in zip(paths, files, layouts, strict=True):
                _fill(path, file, layout, runs, io)
        with together(engine, f"save: naming {folder.name}"):
            if lead:
                _name(folder, files, layouts, io)
    except Exception:
        if lead:
            _remove(paths, io)
        raise
    return True


def write_from_here(
    tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], folder: Path, files: Sequence[WholeFile]
) -> None:
    """Write tensors that this rank has whole, on any device, in these dtypes. Not collective."""
    runs = {name: _Run(0, t.detach(), tuple(t.shape), dtypes[name]) for name, t in tensors.items()}
    layouts = [_layout(file, runs) for file in files]
    paths = [_temporary(folder, file) for file in files]
    try:
        for path, file, layout in zip(paths, files, layouts, strict=True):
            _make(path, layout, DISK)
            _fill(path, file, layout, runs, DISK)
        _name(folder, files, layouts, DISK)
    except Exception:
        _remove(paths, DISK)
        raise


def _runs_of(engine: Engine, dtype: torch.dtype | None) -> Iterator[tuple[str, _Run]]:
    """Yield what this rank has of each parameter and buffer, under all of its names."""
    lead = engine.mesh.world.rank == 0
    for portion in portions_of(engine):
        run = _run_of(portion, save_dtype(portion.own_dtype, dtype))
        yield from ((name, run) for name in (portion.name, *portion.aliases))
    for buffer in buffers_of(engine):
        run = _Run(0, buffer.tensor.detach(), tuple(buffer.tensor.shape), buffer.tensor.dtype, lead)
        yield from ((name, run) for name in (buffer.name, *buffer.aliases))


def _run_of(portion: Portion, dtype: torch.dtype) -> _Run:
    return _Run(portion.start, portion.values, portion.shape, dtype, portion.writes)


def _layout(file: WholeFile, runs: Mapping[str, _Run]) -> Layout:
    return lay_out([(there, runs[own].dtype, runs[own].shape) for there, own in file.names.items()], file.metadata)


def _temporary(folder: Path, file: WholeFile) -> Path:
    path = inside(folder, file.name)
    return path.with_name(f".{path.name}.writing")


def _make(path: Path, layout: Layout, io: DiskIO) -> None:
    io.make_folder(path.parent)
    io.remove(path)
    with io.create(path) as file:
        io.allocate(file, layout.nbytes)
        io.write(file, [layout.head])
        io.flush(file)


def _see(paths: Iterable[Path]) -> bool:
    """Tell whether all files are here; a network's file system may take a moment."""
    end = time.monotonic() + VISIBLE_WITHIN
    while not all(path.is_file() for path in paths):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _fill(path: Path, file: WholeFile, layout: Layout, runs: Mapping[str, _Run], io: DiskIO) -> None:
    """Write this rank's rows into a file, and flush it if there are any."""
    entries = [(entry.begin, runs[file.names[entry.name]]) for entry in layout.entries]
    own = [(begin, run) for begin, run in entries if run.writes and run.values.numel()]
    if own:
        with io.open(path) as target:
            for begin, run in own:
                _write(target, begin + run.start * run.dtype.itemsize, run, io)
            io.flush(target)


def _write(file: BinaryIO, position: int, run: _Run, io: DiskIO) -> None:
    flat = run.values.reshape(-1)
    step = BLOCK // max(flat.itemsize, run.dtype.itemsize)
    for start in range(0, flat.numel(), step):
        block = flat[start : start + step].to("cpu", run.dtype).contiguous()
        io.write_at(file, position, [bytes_of(block)])
        position += block.nbytes


def _name(folder: Path, files: Sequence[WholeFile], layouts: Sequence[Layout], io: DiskIO) -> None:
    """Give the files their names, once all of them have their length."""
    for file, layout in zip(files, layouts, strict=True):
        path = _temporary(folder, file)
        if path.stat().st_size != layout.nbytes:
            raise OSError(f"{path} has {path.stat().st_size} bytes, and {layout.nbytes} were written")
    for file in files:
        io.rename(_temporary(folder, file), inside(folder, file.name))
    io.flush_folder(folder)


def _remove(paths: Iterable[Path], io: DiskIO) -> None:
    for path in paths:
        io.remove(path)
