"""Which checkpoints of an Accelerator are kept, and which is the newest: of rows, or of whole files.

accelerate itself removes the oldest before it begins to save, so that with `total_limit=1` there is none while it
writes; and it counts what a crash left unfinished. Here the old ones go once the new one is complete.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ourshard.checkpoint import commit
from ourshard.checkpoint.sharded import FOLDER
from ourshard.checkpoint.source import WHOLE_OPTIMIZER as OPTIMIZER_FILE
from ourshard.config import CheckpointConfig

logger = logging.getLogger("ourshard")


def newest(root: Path) -> commit.Newest:
    """Return the newest complete checkpoint of an Accelerator, and those that were passed over."""
    return commit.newest_complete(root, inner=FOLDER, of_others=problem_of_whole)


def following(root: Path) -> int:
    """Return the number after that of the last folder, complete or not, as accelerate names them."""
    found = [re.fullmatch(r"checkpoint_(\d+)", each.name) for each in root.iterdir()]
    return max((int(match[1]) for match in found if match), default=-1) + 1


def problem_of_whole(folder: Path) -> str | None:
    """Return why a folder of whole files is not complete; None if it is."""
    files = sorted(folder.glob(f"{OPTIMIZER_FILE}*.bin"))
    if not files:
        return f"it has neither a manifest nor {OPTIMIZER_FILE}.bin, which are written last: not ours, or not finished"
    return next((f"{file.name} is cut off or damaged" for file in files if not zipfile.is_zipfile(file)), None)


def limit_of(project: Any, config: CheckpointConfig) -> int | None:
    """Return how many checkpoints are to be kept: the smaller of accelerate's number and the config's."""
    own = project.total_limit if project.automatic_checkpoint_naming else None
    return min((limit for limit in (own, config.keep) if limit), default=None)


def clear(location: Path, limit: int | None, inner: str = FOLDER) -> None:
    """Remove old checkpoints beside a new one that is complete, whatever its number. One rank alone, no collectives."""
    if limit is None:
        return
    new = location.absolute()
    for path in commit.retain(new.parent, limit, inner=inner, besides=[new], of_others=problem_of_whole):
        logger.info("Removed %s: %d checkpoints are kept.", path, limit)


@contextmanager
def without_limit(project: Any) -> Iterator[None]:
    """Keep accelerate from removing checkpoints."""
    limit, project.total_limit = project.total_limit, None
    try:
        yield
    finally:
        project.total_limit = limit
