"""The temporary folder that a writer fills: streams with hashes, a memory budget, workers, progress, a journal.

Note [Restart]: the journal, a file beside the folder, lists each file that is finished (flushed) with its length and
hash. A conversion that is run anew with the same source and options finds both by their names, and skips what the
journal lists. Its first line is the fingerprint of source and options; with another one the folder is emptied first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import BinaryIO, TypeVar

import xxhash

from .io import DISK, Buffer, DiskIO, inside

COPY_BLOCK = 1 << 20
MAX_BLOCK = 1 << 20  # stays in the cache of a core between read, hash and write
FLUSH_BLOCK = 64 << 20  # as soon as so much is written, the disk begins on it

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file. `digests`: the xxh3_128 of all its bytes, or what its writer noted for each of its pieces."""

    name: str
    nbytes: int
    digests: tuple[str, ...]


class OutputStream:
    """A file being written, front to back; hashes what passes."""

    def __init__(self, io: DiskIO, file: BinaryIO) -> None:
        self._io = io
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._nbytes = 0

    def write(self, data: Buffer) -> int:
        """Append the bytes; return their number, as file objects do."""
        view = memoryview(data).cast("B")
        self._io.write(self._file, [view])
        self._hash.update(view)
        before, self._nbytes = self._nbytes, self._nbytes + view.nbytes
        if before // FLUSH_BLOCK != self._nbytes // FLUSH_BLOCK:
            self._io.begin_flush(self._file)
        return view.nbytes

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._nbytes

    def flush(self) -> None:
        """Do nothing: nothing is held back, and the file is flushed once, when it is finished."""

    def digest(self) -> str:
        """Return the hash of the bytes so far."""
        return self._hash.hexdigest()


class PositionedFile:
    """A file being written at any position, by several workers at once. Its writer puts the hashes into `digests`."""

    def __init__(self, io: DiskIO, file: BinaryIO) -> None:
        self._io = io
        self._file = file
        self._lock = threading.Lock()
        self._nbytes = 0
        self.digests: tuple[str, ...] = ()

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Write these bytes, one after another, from this position."""
        with self._lock:  # the kernel lets one write at a time into a file; to wait here does not spin
            self._io.write_at(self._file, position, buffers)
            before, self._nbytes = self._nbytes, self._nbytes + sum(memoryview(buffer).nbytes for buffer in buffers)
            flush = before // FLUSH_BLOCK != self._nbytes // FLUSH_BLOCK
        if flush:
            self._io.begin_flush(self._file)


class Budget:
    """A number of bytes that workers share. One that asks for more than there is waits until it is alone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Hold this many bytes within the block. Do not nest: two workers that each hold a part would wait forever."""
        taken = min(nbytes, self.nbytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


class Workspace:
    """A temporary folder with its budget and workers. Its maker moves it to its place when all is written."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        *,
        budget: int,
        workers: int = 1,
        io: DiskIO = DISK,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.folder = folder
        self._journal_path = folder.with_name(f"{folder.name}.journal")
        self.io = io
        self.budget = budget
        self.workers = workers
        self.block_nbytes = max(4096, min(MAX_BLOCK, budget // (4 * workers)))  # what to read at a time
        self._budget = Budget(budget)
        self._progress = progress
        self._lock = threading.Lock()
        self._kept = threading.local()
        self._finished = self._open_journal(fingerprint)
        self._started: set[str] = set()

    @property
    def written(self) -> Mapping[str, Written]:
        """Return the finished files by name."""
        return MappingProxyType(self._finished)

    def finished(self, name: str) -> bool:
        """Tell whether an earlier, stopped run has finished this file, so that it need not be written again."""
        return name in self._finished

    @contextmanager
    def create(self, name: str) -> Iterator[OutputStream]:
        """Give a stream for a new file; flush and note it at the end of the block, unless that raises."""
        path = self._claim(name)
        with self.io.create(path) as file:
            stream = OutputStream(self.io, file)
            yield stream
            self.io.flush(file)
        self._note(Written(name, stream.tell(), (stream.digest(),)))

    @contextmanager
    def create_positioned(self, name: str, nbytes: int) -> Iterator[PositionedFile]:
        """Give a new file of this length to be filled in any order; flush and note it as `create` does."""
        path = self._claim(name)
        with self.io.create(path) as file:
            self.io.allocate(file, nbytes)
            target = PositionedFile(self.io, file)
            yield target
            self.io.flush(file)
        if path.stat().st_size != nbytes:
            raise RuntimeError(f"{name} has {path.stat().st_size} bytes, planned were {nbytes}")
        self._note(Written(name, nbytes, target.digests))

    def write_bytes(self, name: str, data: Buffer) -> None:
        """Write a small file, unless it is finished."""
        if not self.finished(name):
            with self.create(name) as stream:
                stream.write(data)

    def copy(self, name: str, path: Path) -> None:
        """Copy a file of the source, unless it is finished."""
        if self.finished(name):
            return
        with open(path, "rb") as source, self.create(name) as stream:
            while block := source.read(COPY_BLOCK):
                stream.write(block)

    def reserve(self, nbytes: int) -> AbstractContextManager[None]:
        """Return a context manager that holds this many bytes of the budget. Do not nest."""
        return self._budget.reserve(nbytes)

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[memoryview]:
        """Give memory of this length, within the budget, that the calling worker has to itself in the block.

        It is kept for the next time: fresh memory costs more than the copy into it. Do not nest, as with `reserve`.
        """
        with self._budget.reserve(nbytes):
            kept: bytearray | None = getattr(self._kept, "buffer", None)
            if kept is None or len(kept) < nbytes:
                kept = bytearray(nbytes)
            if nbytes <= self.block_nbytes:
                self._kept.buffer = kept
            yield memoryview(kept)[:nbytes]

    def report(self, nbytes: int) -> None:
        """Tell the progress bar that this many bytes of tensors are done."""
        if self._progress is not None:
            with self._lock:
                self._progress(nbytes)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call the function for all items on the workers; return the results in order, or raise the first error.

        A worker that calls this does it all by itself: the others have work of their own.
        """
        items = list(items)
        if self.workers == 1 or len(items) < 2 or getattr(self._kept, "is_worker", False):
            return [function(item) for item in items]
        pool = ThreadPoolExecutor(self.workers, initializer=lambda: setattr(self._kept, "is_worker", True))
        try:
            futures = [pool.submit(function, item) for item in items]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or an interrupt, what has not begun does not begin

    def finish(self) -> None:
        """Remove every file that is not in the journal, and flush the folders: all is ready to be moved."""
        listed = {inside(self.folder, name) for name in self._finished}
        for path in self.folder.rglob("*"):
            if path not in listed and not path.is_dir():
                self.io.remove(path)
        self._flush_folders()

    def forget(self) -> None:
        """Remove the journal: the folder has been moved."""
        self.close()
        self.io.remove(self._journal_path)

    def discard(self) -> None:
        """Remove the journal and the folder: the same conversion would fail again."""
        self.forget()
        self.io.remove_tree(self.folder)

    def close(self) -> None:
        """Close the journal, and leave it and the folder for another run."""
        self._journal.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush_folders(self) -> None:
        """Flush the names in all folders, innermost first."""
        folders = {self.folder}
        for name in self._finished:
            path = inside(self.folder, name).parent
            while path not in folders:
                folders.add(path)
                path = path.parent
        for path in sorted(folders, key=lambda path: -len(path.parts)):
            self.io.flush_folder(path)

    def _claim(self, name: str) -> Path:
        """Check a name, make its folder, and clear away what a stopped run left under it."""
        path = inside(self.folder, name)
        with self._lock:
            if name in self._started or name in self._finished:
                raise RuntimeError(f"{name} is written twice")
            self._started.add(name)
        self.io.make_folder(path.parent)
        self.io.remove(path)
        return path

    def _note(self, written: Written) -> None:
        with self._lock:
            self._finished[written.name] = written
            self.io.write(self._journal, [_line(written)])

    def _open_journal(self, fingerprint: str) -> dict[str, Written]:
        """Return what is finished already, with the journal opened for more."""
        self.io.make_folder(self.folder)
        path = self._journal_path
        finished = _read_journal(path, self.folder, fingerprint)
        if finished is None:
            self.io.remove_tree(self.folder)
            self.io.make_folder(self.folder)
        self.io.remove(path)
        self._journal = self.io.create(path)
        lines = [_line(written) for written in (finished or {}).values()]
        self.io.write(self._journal, [json.dumps(fingerprint).encode() + b"\n", *lines])
        return finished or {}


def _line(written: Written) -> bytes:
    return json.dumps([written.name, written.nbytes, written.digests]).encode() + b"\n"


def _read_journal(path: Path, folder: Path, fingerprint: str) -> dict[str, Written] | None:
    """Return the files that are finished and of the noted length; None if the journal is of another conversion."""
    try:
        lines = path.read_text().splitlines()
        if not lines or json.loads(lines[0]) != fingerprint:
            return None
    except (OSError, ValueError):
        return None
    finished = {}
    for line in lines[1:]:
        try:
            name, nbytes, digests = json.loads(line)
            written = Written(name, nbytes, tuple(digests))
            there = inside(folder, written.name).stat().st_size == written.nbytes
        except (OSError, ValueError, TypeError):  # the last line may be cut off
            continue
        if there:
            finished[written.name] = written
    return finished
