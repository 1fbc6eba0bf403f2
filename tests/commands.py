"""Run commands as a user does: `run_cli` for any, `launch` for `accelerate launch`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what steers launchers and backends, and with one thread a process."""
    steering = ("ACCELERATE_", "FSDP_", "OURSHARD_", "TORCHELASTIC_", "MASTER_", "RANK_POOL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        kept.pop(name, None)
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


def kill_tree(pid: int, first: signal.Signals | None = None) -> None:
    """Kill a process that this one started and all its descendants; send `first` and wait 2 s before SIGKILL."""
    try:
        parent = psutil.Process(pid)
        processes = [*parent.children(recursive=True), parent]  # torchrun's workers lead sessions of their own
    except psutil.NoSuchProcess:
        return
    for number in [signal.SIGKILL] if first is None else [first, signal.SIGKILL]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=2)


def free_port() -> int:
    """Return a TCP port that was free a moment ago, below those that systems give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # not the seeded generator: runs beside each other
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class CliResult:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def run_cli(
    args: Sequence[str | Path],
    env: dict[str, str] | None = None,
    timeout: float = 120.0,
    cwd: Path | None = None,
    check: bool = True,
) -> CliResult:
    """Run a command as a user does, in `clean_environment()` with `env` on top.

    With `check`, a nonzero exit code raises `AssertionError` with the output. On a timeout the command and all its
    children are ended by SIGABRT, so that Python processes write their stacks, and `AssertionError` shows the output.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.monotonic()
        process = subprocess.Popen(
            [str(arg) for arg in args],
            cwd=cwd or ROOT,
            env={**clean_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            kill_tree(process.pid, first=signal.SIGABRT)
            process.wait()
        out.seek(0)
        err.seek(0)
        result = CliResult(process.returncode, out.read(), err.read(), time.monotonic() - began)
    if timed_out or (check and result.returncode):
        why = f"did not end within {timeout:g} s" if timed_out else f"ended with exit code {result.returncode}"
        command = " ".join(str(arg) for arg in args)
        raise AssertionError(f"{command}\n{why}\n--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}")
    return result


def launch(
    script: str | Path,
    *args: str | Path,
    processes: int = 2,
    config: str | Path = ROOT / "accelerate_configs" / "ourshard.yaml",
    env: dict[str, str] | None = None,
    timeout: float = 120.0,
    cwd: Path | None = None,
    check: bool = True,
) -> CliResult:
    """Run `accelerate launch` of this environment with a YAML and a number of processes, on a free port."""
    accelerate = Path(sys.executable).with_name("accelerate")
    command: list[str | Path] = [accelerate, "launch", "--config_file", config, "--num_processes", str(processes)]
    command += ["--main_process_port", str(free_port()), script, *args]
    return run_cli(command, env=env, timeout=timeout, cwd=cwd, check=check)
