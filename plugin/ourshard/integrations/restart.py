"""Restarts by the launcher, and `load_after_restart`, by which a plain Accelerate loop comes back after one.

Note [Restarts]
torchrun counts in `TORCHELASTIC_RESTART_COUNT` how often it started the ranks anew after one was lost. Each machine's
torchrun has a count of its own, which grows only where a rank was lost, so the ranks agree on the largest.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from ourshard.integrations import retention
from ourshard.integrations.saving import log_skipped

logger = logging.getLogger("ourshard")


def restarts() -> int:
    """Return how often a launcher started the ranks anew, the same on all ranks. Collective under torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    from accelerate.utils import gather_object

    return int(max(gather_object([int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)])))


def load_after_restart(accelerator: Any) -> str | None:
    """Load the newest complete checkpoint if the launcher started the ranks anew; return its folder, else None.

    To be called after `prepare` and `register_for_checkpointing`, by all ranks. The next `save_state` gets the number
    after the last folder's. Where the loop goes on is for a registered object to say.

    Raises:
        ValueError: if the accelerator does not name its checkpoints itself, so that there is nowhere to look.
    """
    project = accelerator.project_configuration
    if accelerator.project_dir is None or not project.automatic_checkpoint_naming:
        raise ValueError(
            "load_after_restart: this Accelerator doesn't name its checkpoints, so none can be found. Make it with "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True) and call save_state() without "
            "a folder."
        )
    count = restarts()
    if count == 0:
        return None
    root = Path(accelerator.project_dir, "checkpoints")
    from accelerate.utils import broadcast_object_list

    found: list[Any] = list(_look(root)) if accelerator.is_main_process else [None, 0]
    broadcast_object_list(found)
    path, following = found
    project.iteration = following
    if accelerator.is_main_process:
        where = f"loading {path}" if path else f"nothing to load, as {root} has no complete checkpoint"
        logger.warning("Restart %d by the launcher: %s.", count, where)
    if path is not None:
        accelerator.load_state(path)
    return path  # type: ignore[no-any-return]


def _look(root: Path) -> tuple[str | None, int]:
    """Return the newest complete checkpoint, and the number after that of the last folder, complete or not."""
    if not root.is_dir():
        return None, 0
    return log_skipped("load_after_restart", retention.newest(root)), retention.following(root)
