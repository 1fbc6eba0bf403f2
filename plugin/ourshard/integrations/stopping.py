"""SIGTERM: all ranks learn of it at the same step, to save there and end.

Note [SIGTERM]
The signal may reach one rank only, or ranks at different steps; a `LateFlag` lets all stop at the same step. So
training stops at most two step ends after the signal, and then saves. A rank that can't reach a step's end, as one
whose peer was lost, is left to the launcher's SIGKILL, which torchrun sends `--shutdown-timeout` (30 s) later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from datetime import timedelta
from typing import Any

from ourshard.integrations.late_flag import LateFlag

LAST_WITHIN = timedelta(seconds=5)  # that the flags of the last step may take to arrive


class StopSignal:
    """Takes SIGTERM, and tells on all ranks at the same step that one of them got it; see Note [SIGTERM]."""

    def __init__(self) -> None:
        self._flag = LateFlag("SIGTERM")
        self._asked = False

    def listen(self) -> bool:
        """Take SIGTERM, unless the script takes it itself or trains in a thread; return whether it was taken."""
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return False
        signal.signal(signal.SIGTERM, self._ask)
        return True

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once

    def agreed(self) -> bool:
        """Return whether a rank was told to end, the same on all ranks. All call it at the end of each step."""
        return self._flag.raised(self._asked)

    def finish(self, within: timedelta | None = None) -> None:
        """Let the last flags arrive before the process group may go."""
        self._flag.finish(within)


def _leave_to_the_rank() -> None:
    """Let SIGTERM end a process that was forked from a rank: Note [Forked processes]."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopSignal):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_the_rank)

_loop: StopSignal | None = None


def asked_to_end() -> bool:
    """Return whether any rank got SIGTERM: then all are to save, and to leave the loop. Call it once a step.

        if ourshard.asked_to_end():
            accelerator.save_state()
            break

    All ranks get True from the same call, at most two after the signal; they have to call it equally often. The first
    call begins to take the signal, unless the script has a handler of its own, whose affair it is then. A second
    SIGTERM ends the process at once. A Trainer does all of this by itself.
    """
    global _loop
    if _loop is None:
        _loop = StopSignal()
        _loop.listen()
    return _loop.agreed()


def finish() -> None:
    """Let the flags of a loop's last step arrive, and forget the loop."""
    global _loop
    if _loop is not None:
        with contextlib.suppress(RuntimeError):  # a rank has left before
            _loop.finish(LAST_WITHIN)
        _loop = None
