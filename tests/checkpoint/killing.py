"""Saves of forked ranks, of which one, or all, get SIGKILL at the n-th operation of one rank on the disk.

    python -m tests.checkpoint.killing FOLDER WORLDS EVERY      # e.g. out 1,2,4 1; prints one JSON line

Each run is a job of its own: its ranks join, train a step, save `step-1`, train another, and save over `step-1` or
beside it; there the blow falls, half a write in where it is a write. Then what is left is looked at as a resume would,
with all hashes, and compared bit for bit with saves that nobody stopped. Ranks are forked, so that a run costs no
import; this process joins no group. `EVERY`: take each n-th operation.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import ourshard
import torch
import torch.distributed as dist
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.io import Buffer, DiskIO
from ourshard.checkpoint.sharded import ShardedSource

from tests.checkpoint.crashing import CrashIO
from tests.checkpoint.test_running import contents, made, steps

WITHIN = 60.0  # seconds that ranks get to end after one was killed
NAMES = {"beside": "step-2", "over": "step-1"}  # of the second save


class KillIO(CrashIO):
    """Kills this process, or all of the job, in place of the n-th operation, or in the middle of it."""

    def __init__(self, stop_at: int, everyone: bool) -> None:
        super().__init__(stop_at, error=self._strike)
        self._everyone = everyone

    def _strike(self) -> BaseException:
        if self._everyone:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        return AssertionError("alive")

    def write(self, file: BinaryIO, buffers: Sequence[Buffer]) -> None:
        if self.count + 1 == self.stop_at:
            whole = b"".join(bytes(buffer) for buffer in buffers)
            DiskIO.write(self, file, [whole[: len(whole) // 2]])
        super().write(file, buffers)


def rank_main(folder: Path, rank: int, world: int, name: str, io: CrashIO) -> None:
    """Be one rank of a job; leave the number of operations of the second save where nobody dies."""
    if world > 1:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    model, optimizer = made({"stage": 3, "persist_below": 0})
    steps(model, optimizer, range(1))
    ourshard.save(model, optimizer, folder / "out" / "step-1")
    steps(model, optimizer, range(1, 2))
    ourshard.save(model, optimizer, folder / "out" / name, replace=True, io=io)
    (folder / f"count-{rank}").write_text(str(io.count))


def job(folder: Path, world: int, name: str, at: tuple[int, int] | None = None) -> list[int]:
    """Run a job whose rank `at[0]` dies at its operation `at[1]` (all die where that is even); return exit statuses."""
    (folder / "out").mkdir(parents=True)
    children: list[int] = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            io = KillIO(at[1], everyone=at[1] % 2 == 0) if at is not None and at[0] == rank else CrashIO()
            act = functools.partial(rank_main, folder, rank, world, name, io)
            _be_rank(act, children[0] if children else 0, folder / f"stderr-{rank}")
        children.append(child)
        os.setpgid(child, children[0])
    return [_status(child) for child in children]


def _be_rank(act: Callable[[], None], group: int, errors: Path) -> None:
    code = 1
    try:
        os.setpgid(0, group)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        act()
        code = 0
    except RuntimeError as error:  # a rank that was left alone
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _status(child: int) -> int:
    end = time.monotonic() + WITHIN
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    raise AssertionError(f"process {child} hangs after another rank was killed")


def held(path: Path) -> dict[str, bytes]:
    """Return all that a checkpoint holds, as bytes."""
    with ShardedSource(path, verify_reads=True) as source:
        return {
            str(key): bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for key, tensor in contents(source).items()
        }


def kill_everywhere(root: Path, world: int, every: int, log: dict[str, int]) -> None:
    """Run one job for each point of the second save; add to `log` how many left the older one, and the newer."""
    wanted: dict[str, dict[str, bytes]] = {}
    for how, name in NAMES.items():
        whole = root / how
        assert job(whole, world, name) == [0] * world, (whole / "stderr-0").read_text()
        if how == "beside":
            wanted = {"older": held(whole / "out" / "step-1"), "newer": held(whole / "out" / "step-2")}
        counts = [int((whole / f"count-{rank}").read_text()) for rank in range(world)]
        points = [(rank, stop) for rank, count in enumerate(counts) for stop in range(1, count + 1)]
        for rank, stop in points[::-every]:  # from the end: the last operations of a rank come with any `every`
            folder = root / f"{how}-{rank}-{stop}"
            codes = job(folder, world, name, (rank, stop))
            assert codes[rank] == -signal.SIGKILL, codes
            newest = newest_complete(folder / "out", verify=True)
            assert newest.path is not None, (folder, newest.skipped)
            found = held(newest.path)
            which = [kind for kind, values in wanted.items() if values == found]
            assert len(which) == 1, f"{folder}: what loads is neither of the two saves"
            log[which[0]] = log.get(which[0], 0) + 1


def main(root: Path, worlds: Sequence[int], every: int) -> dict[str, int]:
    """Return how many kills left the older checkpoint, and the newer."""
    torch.set_num_threads(1)
    rank_main(root, 0, 1, "warm", CrashIO())  # what is imported on first use is there in all forks
    log: dict[str, int] = {}
    for world in worlds:
        kill_everywhere(root / str(world), world, every, log)
    return log


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), [int(world) for world in sys.argv[2].split(",")], int(sys.argv[3]))))
