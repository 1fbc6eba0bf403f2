"""CASES A05: a save that is stopped at any instant leaves the newest committed checkpoint whole, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ourshard.checkpoint import commit
from ourshard.checkpoint.io import DiskIO, inside
from ourshard.checkpoint.sharded import ShardedSource

from tests.checkpoint.crashing import CrashIO, Killed
from tests.checkpoint.making import assert_holds, assert_loads, describe, make_state, save
from tests.commands import run_cli

OLD, NEW = make_state(0), make_state(4)


def save_next(root: Path, world_size: int, io: DiskIO) -> None:
    """Save step 4 beside step 3 as a trainer does: commit, point `latest` at it, keep one."""
    save(root / "checkpoint-4", NEW, world_size, description=describe(world_size, 4), io=io)
    commit.set_latest(root, "checkpoint-4", io)
    commit.retain(root, 1, io=io)


def save_over(root: Path, world_size: int, io: DiskIO) -> None:
    """Save step 4 under the name of step 3."""
    save(root / "checkpoint-3", NEW, world_size, description=describe(world_size, 4), replace=True, io=io)


def make_root(root: Path, world_size: int) -> Path:
    save(root / "checkpoint-3", OLD, world_size)
    commit.set_latest(root, "checkpoint-3")
    return root


def newest_step(root: Path) -> int:
    """Load what a resume would, assert that it is whole, bit for bit, and return its step."""
    newest = commit.newest_complete(root)
    assert newest.path is not None, newest.skipped
    with ShardedSource(newest.path, verify_reads=True) as source:
        step = source.description.step
        assert step in (3, 4)
        assert_holds(source, OLD if step == 3 else NEW)
        assert source.rank_state(0)["rank"] == 0
    return step


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", [save_next, save_over])
@pytest.mark.parametrize("power", ["kept", "lost"])
def test_a_kill_at_every_write_flush_and_rename_leaves_the_newest_whole(
    tmp_path: Path, world_size: int, action: Any, power: str
) -> None:
    template = make_root(tmp_path / "template", world_size)
    runs = iter(range(100_000))

    def fresh() -> Path:
        return Path(shutil.copytree(template, tmp_path / str(next(runs)) / "out"))

    whole_run = CrashIO()
    action(fresh(), world_size, whole_run)
    log = whole_run.log
    renamed = next(at for at, what in enumerate(log) if what.startswith("rename .checkpoint-") and "writing to" in what)
    durable = log.index("flush folder out", renamed) + 1  # operations after which the new one has to be there
    assert len(log) >= 25 * world_size
    first = 1 + (power == "lost" and world_size == 4)
    for stop_at in range(first, len(log) + 1, 2 if world_size == 4 else 1):
        root = fresh()
        io = CrashIO(stop_at)
        with pytest.raises(Killed):
            action(root, world_size, io)
        if power == "lost":
            io.lose()
        step = newest_step(root)
        assert step == 4 or stop_at <= durable, f"committed, then lost at {io.log[-1]}"
        assert (root / "latest").read_text().strip() in ("checkpoint-3", "checkpoint-4")
        commit.sweep(root)
        assert commit.newest_complete(root).path.name == f"checkpoint-{step if action is save_next else 3}"
        assert not [path for path in root.iterdir() if path.name.startswith(".checkpoint")]


def test_a_process_that_is_really_killed_leaves_the_newest_whole(tmp_path: Path) -> None:
    """The same with SIGKILL, at a few points of the commit."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from tests.checkpoint.crashing import CrashIO
        from tests.checkpoint.test_commit import save_next
        def die():
            os.kill(os.getpid(), signal.SIGKILL)
        for root, stop_at in zip(sys.argv[1::2], sys.argv[2::2]):
            if not (child := os.fork()):
                save_next(Path(root), 2, CrashIO(int(stop_at), error=die))
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    whole_run = CrashIO()
    save_next(make_root(tmp_path / "count", 2), 2, whole_run)
    stops = [len(whole_run.log) * part // 4 for part in (1, 2, 3)]
    roots = [make_root(tmp_path / str(stop_at), 2) for stop_at in stops]
    arguments = [str(word) for pair in zip(roots, stops, strict=True) for word in pair]
    told = run_cli([sys.executable, "-c", program, *arguments]).stdout
    assert told.split() == [str(-signal.SIGKILL)] * len(stops)
    for root in roots:
        assert newest_step(root) == 3
        save_next(root, 2, DiskIO())
        assert newest_step(root) == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_full_or_broken_disk_fails_the_save_and_leaves_the_last_one(tmp_path: Path, number: int) -> None:
    root = make_root(tmp_path / "out", 2)
    whole_run = CrashIO()
    save_next(make_root(tmp_path / "count", 2), 2, whole_run)
    for stop_at in range(1, len(whole_run.log) + 1, 5):
        io = CrashIO(stop_at, error=lambda: OSError(number, os.strerror(number)))
        if not whole_run.log[stop_at - 1].startswith(("write", "create", "flush", "make")):
            continue
        if stop_at > len(whole_run.log) - 12:
            break
        with pytest.raises(OSError, match=os.strerror(number)):
            save_next(root, 2, io)
        assert newest_step(root) == 3
        commit.abandon(root / ".checkpoint-4.writing")
    assert not (root / "checkpoint-4").exists()


def test_an_existing_checkpoint_is_not_written_over_unless_asked(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", OLD, 1)
    with pytest.raises(FileExistsError, match="exists; a checkpoint is not written over"):
        save(tmp_path / "checkpoint-3", NEW, 1)
    assert_loads(tmp_path / "checkpoint-3", OLD)


def test_resume_skips_what_is_not_complete_and_says_why(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11, 12):
        save(tmp_path / f"checkpoint-{step}", OLD, 2, description=describe(2, step))
    commit.begin(tmp_path / "checkpoint-13")
    (tmp_path / "checkpoint-12" / "ourshard.json").unlink()
    shard = next((tmp_path / "checkpoint-11").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "runs").mkdir()
    newest = commit.newest_complete(tmp_path)
    assert newest.path == tmp_path / "checkpoint-10"
    assert len(newest.skipped) == 3
    for said, (name, why) in zip(
        newest.skipped,
        [("checkpoint-13.writing", "not finished"), ("checkpoint-12", "no manifest"), ("checkpoint-11", "is cut off")],
        strict=True,
    ):
        assert name in said
        assert why in said
    assert commit.newest_complete(tmp_path / "nothing").path is None


def test_verify_finds_the_newest_whose_hashes_are_right(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", OLD, 1)
    shard = next((tmp_path / "checkpoint-2" / "optimizer" / "exp_avg").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert commit.newest_complete(tmp_path).path == tmp_path / "checkpoint-2"
    assert commit.newest_complete(tmp_path, verify=True).path == tmp_path / "checkpoint-1"


def test_retention_keeps_the_newest_good_ones_and_never_the_last_one_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path / f"checkpoint-{step}", OLD, 1)
    (tmp_path / "checkpoint-4" / "ourshard.json").unlink()
    assert commit.retain(tmp_path, 2) == [tmp_path / "checkpoint-1"]
    assert commit.retain(tmp_path, 1) == [tmp_path / "checkpoint-2"]
    assert commit.retain(tmp_path, 1) == []
    assert_loads(tmp_path / "checkpoint-3", OLD)
    assert (tmp_path / "checkpoint-4").exists()
    with pytest.raises(ValueError, match="keep is 0"):
        commit.retain(tmp_path, 0)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../b", "", ".", "a//b", "C:\\x", "..\\x", "a\0b", "\\\\host\\x"]
)
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a name inside"):
        inside(tmp_path, name)


def test_a_folder_with_anything_else_in_it_is_never_replaced(tmp_path: Path) -> None:
    """As `save_state(".")` would replace a folder `ourshard` of the user's."""
    final = tmp_path / "ourshard"
    final.mkdir()
    (final / "optimizer").mkdir()  # what is left of one of ours
    commit.begin(final, replace=True)
    (final / "__init__.py").write_text("precious")
    with pytest.raises(FileExistsError, match=r"is not replaced by one: it has '__init__.py'\. Choose another"):
        commit.begin(final, replace=True)
    assert (final / "__init__.py").read_text() == "precious"


@pytest.mark.parametrize("inner", ["", "ourshard"])
def test_what_kills_have_left_of_older_saves_goes_with_the_old_ones(tmp_path: Path, inner: str) -> None:
    """A job that is preempted in a save, and then in another, leaves as many bytes as a checkpoint has each time."""
    names = ["checkpoint-1", "checkpoint-3"]
    for name in names:
        save(tmp_path / name / inner, OLD, 1)
    left = [
        tmp_path / name / ".ourshard.writing" if inner else tmp_path / f".{name}.writing" for name in ("c-2", "c-4")
    ]
    for path in left:
        path.mkdir(parents=True)
        (path / "shard").write_text("half")
    assert commit.retain(tmp_path, 2, inner=inner) == []
    assert [path.exists() for path in left] == [False, True]  # the latter may be going on
    assert commit.newest_complete(tmp_path, inner=inner).path == tmp_path / "checkpoint-3"
    assert (tmp_path / "checkpoint-1").exists()
