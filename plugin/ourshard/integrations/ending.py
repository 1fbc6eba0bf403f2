"""How a rank ends: in order, or so that the others and the log show why.

Note [The first failure]
One rank raises; the ranks that wait for it then fail too, because its connections close. Only the first traceback says
anything. So a rank whose exception is about a lost connection waits `GRACE` seconds before it prints: under torchrun
it is ended within that time and prints nothing; elsewhere it says which rank has gone, and why: Note [Last words]. The
first failing rank also hands its traceback to torchrun, which shows it as the root cause at the end of the log, and
then leaves with `os._exit`, after the exit functions: the destructors of a process group whose peers are stuck may wait
for ever, and torchrun sees a failure only when the process is gone.

Note [Threads of process groups]
A thread of a gloo group frees the tensors of a collective after the main thread was told of its end. If that needs the
interpreter while it goes down, Python ends the thread, and C++ ends the process with SIGABRT. A group joins its threads
when the last reference to it goes, so all of ours are dropped before the groups are destroyed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ourshard.integrations import stopping
from ourshard.runtime import control
from ourshard.runtime.control import DesyncError, explain_lost_connection, say_last_words, stop_watching
from ourshard.runtime.engine import ENGINES
from ourshard.runtime.graphs import let_go_of_graphs
from ourshard.runtime.last_words import LostRankError, is_about_a_connection
from ourshard.runtime.mesh import let_go, let_go_of_all

GRACE = 3.0  # seconds that a rank with a lost connection leaves to the one that failed first
LEAVE_WITHIN = 5.0  # seconds that exit functions get after an exception

_watched = False


def watch() -> None:
    """Leave the process group in order at exit, and on an uncaught exception as the Note says. Once a process."""
    global _watched
    if _watched or not dist.is_initialized() or dist.get_world_size() == 1 or control.forked():
        return
    _watched = True
    control.watch()  # this rank has words from now on
    atexit.register(_leave_group)
    sys.excepthook = _on_exception(sys.excepthook)


def _forget() -> None:
    """Leave a process that was forked from a rank to end as any other: Note [Forked processes]."""
    global _watched
    _watched = False
    atexit.unregister(_leave_group)


os.register_at_fork(after_in_child=_forget)


def _leave_group() -> None:
    """Destroy the process groups, and with them their threads: Note [Threads of process groups].

    The script may have destroyed them itself, as `Accelerator.end_training` does: our references are left all the same.
    """
    _let_go_of_groups()
    stopping.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


def _let_go_of_groups() -> None:
    """Drop the references of all engines to process groups, which nothing can use any more."""
    let_go_of_graphs()
    for engine in ENGINES:
        engine.control.group = engine.control.patient = None
        let_go(engine.mesh)
    let_go_of_all()
    stop_watching()


def _on_exception(show: Callable[..., Any]) -> Callable[..., None]:
    """Return an excepthook around `show`, the one that prints."""

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if control.forked():
            show(kind, value, trace)
            return
        first = not about_a_lost_connection(value)
        if first:
            say_last_words(value)
        if not isinstance(value, Exception):  # Ctrl-C
            show(kind, value, trace)
            return
        if not first:
            time.sleep(GRACE)
        show(kind, value, trace)
        if first:
            _tell_launcher(value)
        elif not any(isinstance(error, LostRankError) for error in _causes(value)):
            print(explain_lost_connection(), file=sys.stderr)
        _leave()

    return excepthook


def about_a_lost_connection(error: BaseException) -> bool:
    """Return whether an exception, or what it was raised from, only says that another rank has gone, and not why."""
    if isinstance(error, DesyncError):
        return False
    return any(isinstance(cause, LostRankError) or is_about_a_connection(cause) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return an exception and those that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _tell_launcher(error: BaseException) -> None:
    """Write the traceback where torchrun looks for it, in the form of its own `record` decorator."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _leave() -> None:
    atexit.unregister(_leave_group)
    killer = threading.Timer(LEAVE_WITHIN, os._exit, (1,))
    killer.daemon = True
    killer.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
