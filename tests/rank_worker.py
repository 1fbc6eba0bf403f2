"""One rank of a pool, started by `tests.rank_pool` with torchrun's environment.

It is forked (`main_of_fork`), or a script of its own (`python -m tests.rank_worker`). It reads commands from a pipe
and answers each with one message. It never runs by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.commands import ROOT
from tests.rank_messages import FD_VARIABLE, STACKS_VARIABLE, RankFailure, RankState

GROUP_TIMEOUT = timedelta(seconds=60)


class _CpuPickler(pickle.Pickler):
    """Send tensors as plain CPU tensors with storage of their own, whatever they were views of."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _CpuPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _join() -> None:
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)


def _rejoin(attempt: int) -> None:
    """Join the default group again. Its keys are in the store from last time, so each attempt has a prefix."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=GROUP_TIMEOUT)
    world = int(os.environ["WORLD_SIZE"])
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(
        "gloo", store=prefixed, rank=int(os.environ["RANK"]), world_size=world, timeout=GROUP_TIMEOUT
    )


def _reset_settings(environment: dict[str, str]) -> None:
    """Put back what tests change in a process: environment, seeds, switches, log level, accelerate's singletons."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    logging.getLogger("ourshard").setLevel(logging.NOTSET)
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def _call(payload: bytes) -> tuple[str, Any]:
    try:
        function, args, kwargs = pickle.loads(payload)
        return "value", _dumps(function(*args, **kwargs))
    except BaseException as error:  # every outcome of a test function belongs to the parent, SystemExit too
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, frames))
        return "failure", RankFailure(int(os.environ["RANK"]), type(error).__name__, str(error), text, time.monotonic())


def _state() -> RankState:
    if not dist.is_initialized():
        return RankState(joined=False, sequence=0, groups=0)
    world = dist.distributed_c10d._get_default_group()
    sequence = world._get_sequence_number_for_group()  # type: ignore[attr-defined]  # missing in torch's stubs
    return RankState(True, sequence, len(dist.distributed_c10d._world.pg_map))


def _clean(environment: dict[str, str]) -> RankState:
    _reset_settings(environment)
    gc.collect()
    return _state()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    while True:
        try:
            command, payload = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the parent is gone or done with us
            return
        if command == "call":
            answer = _call(payload)
        elif command == "clean":
            answer = ("value", _clean(environment))
        elif command == "rejoin":
            _rejoin(payload)
            answer = ("value", None)
        else:
            assert command == "barrier", command
            answer = ("value", dist.barrier())
        pipe.send_bytes(pickle.dumps(answer))


def _run_once(pipe: Connection) -> None:
    """Run one function as the body of a script: an exception ends the process with its traceback on stderr."""
    _, payload = pickle.loads(pipe.recv_bytes())
    function, args, kwargs = pickle.loads(payload)
    value = _dumps(function(*args, **kwargs))
    pipe.send_bytes(pickle.dumps(("value", value)))


def _begin() -> None:
    stacks = os.open(os.environ[STACKS_VARIABLE], os.O_WRONLY | os.O_CREAT)  # the handler writes to it, ever
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    _join()
    _reset_settings(dict(os.environ))


def main_of_fork(environment: dict[str, str], pipe: Connection, outputs: Sequence[str]) -> None:
    """Be a rank of a pool; `outputs` are the files that stdout and stderr go to."""
    os.setsid()
    os.chdir(ROOT)
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process().daemon = False  # it may have children, as those of a DataLoader
    _begin()
    pipe.send_bytes(pickle.dumps(("value", None)))
    with contextlib.suppress(BrokenPipeError):
        _serve(pipe, dict(os.environ))


def main() -> None:
    """Run one function as a script does."""
    pipe = Connection(int(os.environ[FD_VARIABLE]))
    _begin()
    pipe.send_bytes(pickle.dumps(("value", None)))
    _run_once(pipe)


if __name__ == "__main__":
    main()
