"""The files that accelerate and the Trainer write beside a checkpoint's rows, and that a resume reads.

Their hashes go into the manifest, which is written last of all. So a folder that was saved into a second time, and
whose second save a crash stopped half-way, is not taken for either of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

FILES = "trainer_files"  # in the manifest's client state: file -> hash


def hashes_of(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Return the hashes of the files that fit."""
    return {path.name: _hash(path) for pattern in patterns for path in sorted(folder.glob(pattern))}


def files_problem(folder: Path, client_state: Mapping[str, Any], *, missing: bool = True) -> str | None:
    """Return which of the files is not the one that was saved, if any; `missing`: or is not there."""
    for name, digest in client_state.get(FILES, {}).items():
        path = folder / name
        if not path.is_file():
            if missing:
                return f"{path} is missing"
        elif _hash(path) != digest:
            return f"{path} is damaged, or was changed: it is not what was saved"
    return None


def _hash(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()
