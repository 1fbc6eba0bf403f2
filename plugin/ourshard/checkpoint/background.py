"""Write a staged save from a thread, and let all ranks agree on what became of it.

Note [Background saves]
One save of a process is written at a time. Its threads agree over a gloo group of their own, since collectives pair by
order and those of training go on meanwhile: all have written and flushed; rank 0 has renamed the folder. So each rank
knows the outcome. An error is logged at once, and raised on all ranks by the next call that waits for the save: the
next save, a load, `wait_for_save`. Training steps do not raise it: ranks would do so in different ones. The thread is
no daemon, so that a process which ends in order finishes its save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from ourshard.runtime.control import PATIENCE
from ourshard.runtime.mesh import host_group

from .source import CheckpointError
from .staging import Staging

logger = logging.getLogger("ourshard")


class Background:
    """The save that this process writes in the background, if there is one, and the host memory it is staged in."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    @property
    def busy(self) -> bool:
        """Tell whether this rank is still writing; others may be through."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return once the save is committed; raise CheckpointError, once, if it was not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(error)

    def start(
        self,
        name: str,
        *,
        write: Callable[[], None],
        publish: Callable[[], None] | None,
        abandon: Callable[[], None] | None,
    ) -> None:
        """Call `write` on all ranks, then `publish` on those that have it, or `abandon` if a rank failed. Collective.

        All are called in the thread, and use no collectives.
        """
        assert self._thread is None, "the save before was not waited for"
        group = host_group("background saves", PATIENCE)

        def run() -> None:
            error = _agree(group, _attempt(write), f"writing {name}")
            if error is None:
                error = _agree(group, _attempt(publish) if publish else None, f"committing {name}")
            if error is not None:
                self._error = f"background save: {error}"
                logger.error("%s; training goes on, and the checkpoint before is intact.", self._error)
                if abandon:
                    _attempt(abandon)

        self._thread = threading.Thread(target=run, name="ourshard-save")
        self._thread.start()


def _attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _agree(group: dist.ProcessGroup | None, error: str | None, label: str) -> str | None:
    """Return the first rank's error, the same on all ranks; one of its own where the others are gone."""
    errors: list[str | None] = [error]
    if group is not None:
        errors = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(errors, error, group=group)
        except Exception as problem:
            return f"{label}: {error or f'no word from all ranks: {problem}'}"
    found = next(((rank, text) for rank, text in enumerate(errors) if text is not None), None)
    return None if found is None else f"{label}: {found[1]} (on rank {found[0]})"


BACKGROUND = Background()


def wait_for_save() -> None:
    """Return once the last background save is committed; raise CheckpointError if it failed. Call it on all ranks."""
    BACKGROUND.wait()
