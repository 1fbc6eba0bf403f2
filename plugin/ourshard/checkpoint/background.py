"""Write a staged save from a thread, and let all ranks agree on what became of it.

Note [Background saves]
One save of a process is written at a time. Its threads agree over a gloo group of their own, since collectives pair by
order and those of training go on meanwhile: all have written and flushed; rank 0 has renamed the folder. So each rank
knows the outcome. An error is logged at once, and then told three times until someone has caught it: a warning at the
next optimizer step, an error in the next call that waits for the save (the next save, a load, `wait_for_save`), and
the exit code. The thread is no daemon, so that a process which ends in order finishes its save.

Note [The step that tells]
All ranks warn at the same step, so that one which makes the warning an error ends all of them there, and none waits for
another in a collective. Steps are counted from the save on. The threads agree on the one after the last that any rank
has made; until they have, no step ends. So training takes no collective for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ourshard.runtime.control import PATIENCE
from ourshard.runtime.mesh import host_group
from ourshard.runtime.optim import engines_of

from .agreeing import Failure
from .staging import Staging

logger = logging.getLogger("ourshard")


class SaveWarning(UserWarning):
    """A background save has failed; training goes on without it."""


class Background:
    """The save that this process writes in the background, if there is one, and the host memory it is staged in."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Failure | None = None
        self._steps = _Steps()

    @property
    def busy(self) -> bool:
        """Tell whether this rank is still writing; others may be through."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return once the save is committed; raise CheckpointError, once, if it was not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._steps.end()
        error, self._error = self._error, None
        if error is not None:
            raise error.error()

    def exit(self) -> None:
        """End the process with 1 if the last save failed and nobody was told by an exception. The thread is through."""
        if self._error is not None:
            print(f"ourshard: {self._error.text}. No checkpoint was written since; ending with 1.", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)

    def forget(self) -> None:
        """Leave the rank's save to it, in a process that was forked from it: Note [Forked processes]."""
        self._thread = self._error = None

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
        self._steps.begin()

        def run() -> None:
            error = _agree(group, _attempt(write, f"background save: writing {name}"))
            if error is None:
                committing = _attempt(publish, f"background save: committing {name}") if publish else None
                error = _agree(group, committing)
            if error is not None:
                self._error = error
                logger.error("%s; training goes on, and the checkpoint before is intact.", error.text)
                self._steps.tell(group, error.text)
                if abandon:
                    _attempt(abandon, "clearing up")
            else:
                self._steps.end()

        self._thread = threading.Thread(target=run, name="ourshard-save")
        self._thread.start()


class _Steps:
    """Warns of a failed save at an optimizer step, the same on all ranks: Note [The step that tells]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = False
        self._made = 0  # since the save began
        self._warn_at: int | None = None
        self._text = ""
        self._hook: Any = None

    def begin(self) -> None:
        """Count from here on."""
        if self._hook is None:  # there for good: torch can't remove it from within a step
            self._hook = register_optimizer_step_post_hook(self._after_step)
        self._counts, self._made, self._warn_at = True, 0, None

    def end(self) -> None:
        """Forget the save: it is complete, or the error was told."""
        self._counts = False

    def tell(self, group: dist.ProcessGroup | None, text: str) -> None:
        """Agree with the threads of all ranks on the step."""
        with self._lock:
            made: list[Any] = [self._made]
            if group is not None:
                made *= dist.get_world_size(group)
                if _attempt(lambda: dist.all_gather_object(made, self._made, group=group), "which step"):
                    made = [self._made]  # ranks have gone
            self._warn_at, self._text = max(made) + 1, text

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._counts or not engines_of(optimizer):
            return
        with self._lock:
            self._made += 1
            due = self._warn_at is not None and self._made >= self._warn_at
        if due:
            self.end()
            warnings.warn(f"{self._text}; training goes on without it", SaveWarning, stacklevel=2)


def _attempt(action: Callable[[], None], label: str) -> Failure | None:
    try:
        action()
    except Exception as error:
        return Failure.of(error, label)
    return None


def _agree(group: dist.ProcessGroup | None, error: Failure | None) -> Failure | None:
    """Return the first rank's error, the same on all ranks; one of its own where the others are gone."""
    errors: list[Failure | None] = [error]
    if group is not None:
        errors = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(errors, error, group=group)
        except Exception as problem:
            return error or Failure(f"background save: no word from all ranks: {problem}", False)
    return next((each.on(rank, "on") for rank, each in enumerate(errors) if each is not None), None)


BACKGROUND = Background()
atexit.register(BACKGROUND.exit)
os.register_at_fork(after_in_child=BACKGROUND.forget)


def wait_for_save() -> None:
    """Return once the last background save is committed; raise CheckpointError if it failed. Call it on all ranks."""
    BACKGROUND.wait()
