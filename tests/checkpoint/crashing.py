"""A disk that dies at the n-th operation, and then keeps or loses what was not flushed.

`CrashIO(stop_at=n)` raises `Killed` in place of the n-th operation; a write that dies has written half. Afterwards:
- nothing more: the process was killed, the page cache lived on;
- `lose()`: the power failed. Bytes of files that were not flushed are gone, new names in folders that were not flushed
  too, and renames whose folder was not flushed are undone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from ourshard.checkpoint.io import Buffer, DiskIO


class Killed(BaseException):
    """The process is dead: no handler for ordinary errors may catch it."""


class CrashIO(DiskIO):
    """The real disk with a counter. `stop_at` None: count only."""

    def __init__(self, stop_at: int | None = None, error: Callable[[], BaseException] = Killed) -> None:
        self.stop_at = stop_at
        self.error = error
        self.count = 0
        self.log: list[str] = []
        self._unflushed: dict[Path, int] = {}  # file -> bytes that are safe
        self._new: dict[Path, set[Path]] = {}  # folder -> names that are not safe
        self._undo: dict[Path, list[Callable[[], None]]] = {}  # folder -> how to take back its renames, last first

    def _tick(self, what: str) -> None:
        self.count += 1
        self.log.append(what)
        if self.count == self.stop_at:
            raise self.error()

    def make_folder(self, path: Path) -> None:
        self._tick(f"make {path.name}")
        existed = path.exists()
        super().make_folder(path)
        if not existed:
            self._new.setdefault(path.parent, set()).add(path)

    def create(self, path: Path) -> BinaryIO:
        self._tick(f"create {path.name}")
        self._unflushed[path] = 0
        self._new.setdefault(path.parent, set()).add(path)
        return super().create(path)

    def write(self, file: BinaryIO, buffers: Sequence[Buffer]) -> None:
        try:
            self._tick(f"write {Path(file.name).name}")
        except BaseException:
            whole = b"".join(bytes(buffer) for buffer in buffers)
            super().write(file, [whole[: len(whole) // 2]])
            raise
        super().write(file, buffers)

    def write_at(self, file: BinaryIO, position: int, buffers: Sequence[Buffer]) -> None:
        self._tick(f"write {Path(file.name).name} at {position}")
        super().write_at(file, position, buffers)

    def flush(self, file: BinaryIO) -> None:
        self._tick(f"flush {Path(file.name).name}")
        super().flush(file)
        self._unflushed.pop(Path(file.name), None)

    def flush_folder(self, path: Path) -> None:
        self._tick(f"flush folder {path.name}")
        super().flush_folder(path)
        self._new.pop(path, None)
        self._undo.pop(path, None)

    def rename(self, source: Path, target: Path) -> None:
        self._tick(f"rename {source.name} to {target.name}")
        before = target.read_bytes() if target.is_file() else None
        super().rename(source, target)
        self._move_notes(source, target)

        def undo() -> None:
            if before is not None:
                target.write_bytes(before)
            elif target.exists():  # it may have been new, and be gone with its name
                target.rename(source)

        self._undo.setdefault(target.parent, []).append(undo)

    def remove(self, path: Path) -> None:
        self._tick(f"remove {path.name}")
        super().remove(path)
        self._unflushed.pop(path, None)

    def remove_tree(self, path: Path) -> None:
        self._tick(f"remove tree {path.name}")
        super().remove_tree(path)

    def lose(self) -> None:
        """Let the power fail."""
        for path, safe in self._unflushed.items():
            if path.exists():
                data = path.read_bytes()
                path.write_bytes(data[:safe])
        for names in self._new.values():
            for path in names:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        for undos in self._undo.values():
            for undo in reversed(undos):
                undo()

    def _move_notes(self, source: Path, target: Path) -> None:
        """Keep track of what lies below a folder that was renamed."""

        def moved(path: Path) -> Path:
            return target / path.relative_to(source) if source == path or source in path.parents else path

        self._unflushed = {moved(path): safe for path, safe in self._unflushed.items()}
        self._new = {moved(folder): {moved(path) for path in paths} for folder, paths in self._new.items()}
