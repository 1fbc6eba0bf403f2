"""Real gloo ranks for tests, started once per world size and used by many tests.

A test takes the fixture `ranks`:

    def total(value: int) -> float:                 # a module-level function; it runs on every rank
        tensor = torch.tensor(float(value + dist.get_rank()))
        dist.all_reduce(tensor)
        return tensor.item()

    @pytest.mark.ranks
    def test_all_ranks_see_the_sum(ranks):
        assert ranks(2)(total, 1, timeout=20) == [3.0, 3.0]

- Each rank is a process with one thread, the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK,
  LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...), ACCELERATE_USE_CPU=true, and the default gloo group joined.
- Values come back pickled, in rank order; tensors as plain CPU tensors that share nothing.
- What a rank printed is printed by the test, with the rank before each line.
- An exception raises `RankError` in the test: the first failing rank's traceback first, the others shortened.
  `error.failures` holds one `RankFailure` (rank, type_name, message, traceback) for each rank that raised, first first.
- Ranks that do not answer in time raise `RankTimeout` with every rank's stack; the next test gets new processes.
- After each test, seeds, environment, torch's switches and accelerate's singletons are put back, garbage is collected,
  and the ranks must have done the same number of collectives, else the test fails.
- The ranks of a pool are forked from one process that has imported torch, accelerate and transformers.
- `ranks(2, fresh=True)(fn, ...)` starts processes for this call only, which import and run `fn` as a script does: an
  exception ends the process. It returns a `FreshResult` with values, exit codes (negative: a signal) and stderr.

`tests.commands` has `run_cli` and `launch`, which run commands as a user does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.commands import ROOT, clean_environment, kill_tree
from tests.rank_messages import FD_VARIABLE, STACKS_VARIABLE, RankFailure, RankState

START_TIMEOUT = 120.0  # seconds; two cores import torch in four processes
TEST_TIMEOUT = 120.0  # of a call that gives none: tests take seconds, and a machine may have other work
CLEAN_TIMEOUT = 60.0
GRACE = 5.0  # seconds that the other ranks get after the first failure
MOST_GROUPS = 64  # a pool whose tests made more process groups than this is replaced
MOST_POOLS = 2


@dataclass(frozen=True)
class FreshResult:
    """How the processes of a `fresh` call ended, by rank. The value of a rank that gave none is None."""

    values: list[Any]
    exitcodes: list[int]
    stderr: list[str]
    seconds: float


class RankError(AssertionError):
    """One or more ranks raised or died."""

    def __init__(self, text: str, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(text)
        self.failures = list(failures)


class RankTimeout(RankError):
    """One or more ranks did not answer in time."""


class _Forked:
    """A process forked from one that has imported torch and others; what a pool asks of a `Popen`."""

    def __init__(self, environment: dict[str, str], pipe: Connection, outputs: Sequence[str]) -> None:
        from tests import rank_worker  # imports torch

        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.rank_imports"])
        arguments = (environment, pipe, outputs)
        self._process = ForkServerProcess(target=rank_worker.main_of_fork, args=arguments, daemon=True)
        mine, clean = dict(os.environ), clean_environment()
        try:
            os.environ.clear()
            os.environ.update(clean)  # of the process that is forked from, if it starts now
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(mine)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Rank:
    """One worker process with its pipe and its files."""

    def __init__(self, rank: int, environment: dict[str, str], folder: Path, fresh: bool) -> None:
        self.rank = rank
        self._stacks = folder / f"stacks-{rank}"
        self._outputs = {name: folder / f"{name}-{rank}" for name in ("stdout", "stderr")}
        self._told = dict.fromkeys(self._outputs, 0)
        self.pipe, theirs = Pipe()
        environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
        environment |= {FD_VARIABLE: str(theirs.fileno()), STACKS_VARIABLE: str(self._stacks)}
        for path in self._outputs.values():
            path.touch()
        start = self._start_script if fresh else self._fork
        self.process: subprocess.Popen[bytes] | _Forked = start(environment, theirs)
        theirs.close()

    def _fork(self, environment: dict[str, str], theirs: Connection) -> _Forked:
        return _Forked(environment, theirs, [str(path) for path in self._outputs.values()])

    def _start_script(self, environment: dict[str, str], theirs: Connection) -> subprocess.Popen[bytes]:
        with self._outputs["stdout"].open("w") as stdout, self._outputs["stderr"].open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.rank_worker"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def new_output(self) -> dict[str, str]:
        """Return what was printed since the last call, by stream."""
        texts = {}
        for name, path in self._outputs.items():
            with path.open(errors="replace") as file:
                file.seek(self._told[name])
                texts[name] = file.read()
                self._told[name] = file.tell()
        return texts

    def ask_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        return self._stacks.read_text(errors="replace").strip() if self._stacks.exists() else ""

    def kill(self) -> None:
        kill_tree(self.process.pid)
        self.process.wait()
        self.pipe.close()


class RankPool:
    """`world` processes in one gloo group. `broken` is set when they can't be used any more."""

    def __init__(self, world: int, fresh: bool = False) -> None:
        from torch.distributed import TCPStore

        self.world = world
        self.broken = False
        self._failed = False  # set when a test function raised: its collectives may not have matched
        self._attempt = 0
        self._folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        # This process hosts the store, as torchrun's agent does: the port is free because it is bound here.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = _rank_environment(world, self._store.port)
        self._ranks = [_Rank(rank, environment, self._folder, fresh) for rank in range(world)]
        self._collect(START_TIMEOUT, "starting")

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        """Run `function` on every rank and return the values in rank order. Raises `RankError` or `RankTimeout`."""
        name = f"{function.__module__}.{function.__qualname__}"
        self._send("call", _payload(function, args, kwargs))
        try:
            return [pickle.loads(value) for value in self._collect(timeout, name)]
        finally:
            self._print_outputs()

    def run_once(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> FreshResult:
        """Run `function` as the last act of these processes; see `FreshResult`. Raises `RankTimeout`."""
        began = time.monotonic()
        self._send("call", _payload(function, args, kwargs))
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, began + timeout - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RankTimeout(self._timeout_text(timeout, function.__qualname__)) from None
        seconds = time.monotonic() - began
        outputs = [rank.new_output() for rank in self._ranks]
        values = [self._last_value(rank) for rank in self._ranks]
        exitcodes = [rank.process.returncode for rank in self._ranks]
        return FreshResult(values, exitcodes, [output["stderr"] for output in outputs], seconds)

    def clean(self) -> None:
        """Make the ranks ready for the next test. Raises `RankError` when they are not in step."""
        states: list[RankState] = self._ask("clean")
        joined = {state.joined for state in states}
        out_of_step = len(joined) > 1 or len({state.sequence for state in states}) > 1
        if out_of_step and self._failed:
            self.broken = True  # the test has its error already
            return
        if len(joined) > 1:
            self._fail(f"After the test only some ranks are in the default process group: {states}")
        if joined == {False}:  # the code under test destroyed it, as `Accelerator.end_training` does
            self._attempt += 1
            self._ask("rejoin", self._attempt)
        elif out_of_step:
            self._fail(f"After the test the ranks have done different numbers of collectives: {states}")
        self._ask("barrier")
        self._print_outputs()
        self._failed = False
        self.broken = self.broken or max(state.groups for state in states) > MOST_GROUPS

    def close(self) -> None:
        """End the processes and remove their files."""
        self.broken = True
        for rank in self._ranks:
            rank.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, command: str, payload: Any = None) -> list[Any]:
        self._send(command, payload)
        return self._collect(CLEAN_TIMEOUT, f"{command} after the test")

    def _send(self, command: str, payload: Any) -> None:
        message = pickle.dumps((command, payload))
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported where its answer is missing
                rank.pipe.send_bytes(message)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """Return one answer of each rank; on failure or silence raise with what each rank did."""
        values: dict[int, Any] = {}
        failures: list[RankFailure] = []
        waiting: dict[Connection, _Rank] = {rank.pipe: rank for rank in self._ranks}
        deadline = time.monotonic() + timeout
        try:
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for pipe in ready:
                    rank = waiting.pop(pipe)  # type: ignore[call-overload]
                    kind, value = self._answer(rank)
                    values[rank.rank] = value
                    if kind == "failure":
                        failures.append(value)
                        deadline = min(deadline, time.monotonic() + GRACE)
        except BaseException:  # an interrupt or pytest-timeout: the ranks are in the middle of something
            self.broken = True
            raise
        if failures:
            raise RankError(self._failure_text(failures, list(waiting.values()), what), failures)
        if waiting:
            raise RankTimeout(self._timeout_text(timeout, what))
        return [values[rank] for rank in range(self.world)]

    def _answer(self, rank: _Rank) -> tuple[str, Any]:
        try:
            return pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.broken = True
            code = rank.process.wait()
            text = f"The process ended with exit code {code}.\n{rank.new_output()['stderr']}"
            return "failure", RankFailure(rank.rank, "ProcessDied", f"exit code {code}", text, time.monotonic())

    def _last_value(self, rank: _Rank) -> Any:
        try:
            return pickle.loads(pickle.loads(rank.pipe.recv_bytes())[1]) if rank.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def _failure_text(self, failures: list[RankFailure], silent: list[_Rank], what: str) -> str:
        self._failed = True
        failures.sort(key=lambda failure: failure.when)
        first, *others = failures
        parts = [f"{what}: rank {first.rank} of {self.world} failed first.\n{first.traceback}"]
        parts += [f"rank {failure.rank} failed later:\n{_shorten(failure.traceback)}" for failure in others]
        if silent:
            self.broken = True
            parts.append(f"Still running {GRACE:g} s after the first failure:\n{self._stacks(silent)}")
        return "\n".join(parts)

    def _timeout_text(self, timeout: float, what: str) -> str:
        self.broken = True
        return f"{what}: not all of {self.world} ranks ended within {timeout:g} s.\n{self._stacks(self._ranks)}"

    def _stacks(self, ranks: Iterable[_Rank]) -> str:
        ranks = list(ranks)
        for rank in ranks:
            rank.ask_stacks()
        time.sleep(0.5)  # the handlers write at once; nothing tells us when they have
        parts = []
        for rank in ranks:
            code = rank.process.poll()
            state = "is running" if code is None else f"ended with exit code {code}"
            parts.append(f"rank {rank.rank} {state}:\n{rank.stacks()}\n{rank.new_output()['stderr'][-2000:]}")
        return "\n".join(parts)

    def _fail(self, text: str) -> None:
        self.broken = True
        raise RankError(text)

    def _print_outputs(self) -> None:
        for rank in self._ranks:
            for name, text in rank.new_output().items():
                stream = sys.stdout if name == "stdout" else sys.stderr
                for line in text.splitlines():
                    print(f"[rank {rank.rank}] {line}", file=stream)


class PoolSet:
    """The pools of a test session: started when first asked for, at most `MOST_POOLS` alive, replaced when broken."""

    def __init__(self) -> None:
        self._pools: OrderedDict[int, RankPool] = OrderedDict()
        self._used: list[RankPool] = []

    def ranks(self, world: int, fresh: bool = False) -> Callable[..., Any]:
        """Return `call(function, *args, timeout=120, **kwargs)`, which runs a module-level function on all ranks."""

        def call(function: Callable[..., Any], *args: Any, timeout: float = TEST_TIMEOUT, **kwargs: Any) -> Any:
            if not fresh:
                return self._pool(world).run(function, args, kwargs, timeout)
            pool = RankPool(world, fresh=True)
            try:
                return pool.run_once(function, args, kwargs, timeout)
            finally:
                pool.close()

        return call

    def end_test(self) -> None:
        """Clean the pools that the test used, and drop the broken ones."""
        used, self._used = self._used, []
        try:
            for pool in used:
                if not pool.broken:
                    pool.clean()
        finally:
            for pool in used:
                if pool.broken:
                    self._drop(pool)

    def close(self) -> None:
        for pool in list(self._pools.values()):
            self._drop(pool)

    def _pool(self, world: int) -> RankPool:
        pool = self._pools.get(world)
        if pool is not None and pool.broken:
            self._drop(pool)
            pool = None
        if pool is None:
            while len(self._pools) >= MOST_POOLS:
                self._drop(next(iter(self._pools.values())))
            pool = self._pools[world] = RankPool(world)
        self._pools.move_to_end(world)
        if pool not in self._used:
            self._used.append(pool)
        return pool

    def _drop(self, pool: RankPool) -> None:
        if self._pools.get(pool.world) is pool:
            del self._pools[pool.world]
        pool.close()


def _rank_environment(world: int, port: int) -> dict[str, str]:
    return {
        **clean_environment(),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "rank-pool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ACCELERATE_USE_CPU": "true",
    }


def _payload(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, tuple(args), kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{function!r} or its arguments can't be sent to ranks ({error}); use a module-level function and "
            "picklable arguments."
        ) from error


def _shorten(traceback: str, lines: int = 6) -> str:
    kept = traceback.rstrip().splitlines()
    return "\n".join(["  ...", *kept[-lines:]] if len(kept) > lines else kept)
