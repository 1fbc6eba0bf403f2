"""CASES I02. Saves written in the background: what they hold, how they fail, and what a save does beside another."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.io import Buffer, DiskIO
from ourshard.checkpoint.source import CheckpointError, detect

from tests.checkpoint.test_running import assert_same_bits, contents, made, steps

pytestmark = pytest.mark.ranks

STAGES = [{"stage": stage, "persist_below": 100} for stage in (0, 3)]


def in_background(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**config, "checkpoint": {"asynchronous": True, **options}}


class Held(DiskIO):
    """Writes nothing before `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, file: BinaryIO, buffers: Sequence[Buffer]) -> None:
        assert self.go.wait(60)
        super().write(file, buffers)


class Full(DiskIO):
    """Says that the disk is full."""

    def write(self, file: BinaryIO, buffers: Sequence[Buffer]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def save_while_training(root: str, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Save at once and in the background, train on before a byte of the latter is written; load it, train again."""
    import ourshard
    from ourshard.checkpoint.background import BACKGROUND

    model, optimizer = made(config)
    steps(model, optimizer, range(3))
    ourshard.save(model, optimizer, f"{root}/at-once", client_state={"epoch": 3})
    model, optimizer = made(in_background(config))
    ourshard.load(model, optimizer, f"{root}/at-once")
    held, state = Held(), {"epoch": 3, "seen": torch.tensor([5])}
    ourshard.save(model, optimizer, f"{root}/background", client_state=state, io=held)
    state["seen"].zero_()
    losses = steps(model, optimizer, range(3, 5))
    optimizer.param_groups[0]["lr"] = 0.5
    assert BACKGROUND.busy
    assert not Path(root, "background").exists()
    held.go.set()
    ourshard.save(model, optimizer, f"{root}/again")  # waits
    assert Path(root, "background").exists()
    before = BACKGROUND.staging.nbytes
    ourshard.save(model, optimizer, f"{root}/again", replace=True)
    assert BACKGROUND.staging.nbytes == before
    loaded = ourshard.load(model, optimizer, f"{root}/background")  # waits too
    assert loaded["seen"].tolist() == [5]
    return losses, steps(model, optimizer, range(3, 5))


@pytest.mark.parametrize("config", STAGES, ids=["stage0", "stage3"])
def test_it_holds_the_moment_of_the_save_though_training_went_on(
    ranks: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    for losses, again in ranks(2)(save_while_training, str(tmp_path), config):
        assert losses == again
    with detect(tmp_path / "at-once") as first, detect(tmp_path / "background") as second:
        before, after = contents(first), contents(second)
        assert first.description.param_groups == second.description.param_groups
        assert first.description.step == second.description.step == 3
        assert all(problem is None for _, problem in second.verify_files())
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert_same_bits(value, after[key], str(key))


def fail_on_rank_1(root: str) -> tuple[str, str]:
    """Save twice, the second time with a full disk on rank 1; return what the next two savers get to hear."""
    import ourshard
    import torch.distributed as dist

    model, optimizer = made(in_background({"stage": 3, "persist_below": 0}))
    steps(model, optimizer, range(2))
    ourshard.save(model, optimizer, f"{root}/step-1")
    ourshard.save(model, optimizer, f"{root}/step-2", io=Full() if dist.get_rank() == 1 else DiskIO())
    steps(model, optimizer, range(2, 4))
    told = []
    for name in ("step-3", "step-4"):
        try:
            ourshard.save(model, optimizer, f"{root}/{name}")
            ourshard.wait_for_save()
            told.append("saved")
        except CheckpointError as error:
            told.append(str(error))
    return told[0], told[1]


def test_one_rank_that_fails_fails_the_save_on_all_and_the_next_save_says_so(ranks: Any, tmp_path: Path) -> None:
    for first, second in ranks(2)(fail_on_rank_1, str(tmp_path)):
        assert "writing step-2: OSError: [Errno 28] No space left on device (on rank 1)" in first
        assert second == "saved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-4"]
    assert newest_complete(tmp_path, verify=True).path == tmp_path / "step-4"


def step_until_warned(root: str, raising: bool) -> tuple[int, str]:
    """Let the disk of rank 1 fail while both train; return the step that told, and its words."""
    import warnings

    import ourshard
    import torch.distributed as dist
    from ourshard.checkpoint.background import BACKGROUND

    class Late(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.2 * dist.get_rank())

    model, optimizer = made(in_background({"stage": 3, "persist_below": 0}))
    handler = Late()
    logging.getLogger("ourshard").addHandler(handler)
    ourshard.save(model, optimizer, f"{root}/step-2", io=Full() if dist.get_rank() == 1 else DiskIO())
    told: list[tuple[int, str]] = []
    for number in range(10_000):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error" if raising else "always", ourshard.SaveWarning)
            try:
                steps(model, optimizer, range(1))
            except ourshard.SaveWarning as error:
                told.append((number, str(error)))
        told += [(number, str(each.message)) for each in caught if each.category is ourshard.SaveWarning]
        if told and number > told[0][0] + 3:
            break
    logging.getLogger("ourshard").removeHandler(handler)
    with pytest.raises(CheckpointError, match="on rank 1"):
        ourshard.wait_for_save()
    BACKGROUND.exit()  # does not end the process any more
    assert len(told) == 1
    return told[0]


@pytest.mark.parametrize("raising", [False, True], ids=["warning", "error"])
def test_a_failed_save_is_told_at_the_next_step_the_same_on_all_ranks(
    ranks: Any, tmp_path: Path, raising: bool
) -> None:
    (step, text), other = ranks(2)(step_until_warned, str(tmp_path), raising)
    assert (step, text) == other
    assert "writing step-2: OSError: [Errno 28] No space left on device (on rank 1); training goes on" in text


def save_while_one_is_written(root: str) -> list[str]:
    """Save while rank 1 alone is held up; return what is logged."""
    import ourshard
    import torch.distributed as dist

    model, optimizer = made(in_background({"stage": 2}, when_busy="skip"))
    held = Held()
    if dist.get_rank() == 0:
        held.go.set()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ourshard").addHandler(handler)
    try:
        ourshard.save(model, optimizer, f"{root}/step-1", io=held)
        ourshard.save(model, optimizer, f"{root}/step-2")
        held.go.set()
        ourshard.wait_for_save()
        dist.barrier()
        ourshard.save(model, optimizer, f"{root}/step-3")
        ourshard.wait_for_save()
    finally:
        logging.getLogger("ourshard").removeHandler(handler)
    return logged


def test_with_skip_no_rank_saves_while_any_is_still_writing(ranks: Any, tmp_path: Path) -> None:
    for logged in ranks(2)(save_while_one_is_written, str(tmp_path)):
        assert any("A save was skipped" in text for text in logged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def save_in_inference_mode(root: str) -> tuple[list[float], list[float]]:
    """Save twice, the second time where an evaluation does, load there too, and train on; return the losses of both."""
    import ourshard

    model, optimizer = made(in_background({"stage": 3, "persist_below": 0}))
    with torch.inference_mode():
        ourshard.save(model, optimizer, f"{root}/before")
    steps(model, optimizer, range(3))
    with pytest.raises(ValueError, match=r"client_state.step is a function|rank 0"):  # at once, not in the background
        ourshard.save(model, optimizer, f"{root}/code", client_state={"step": steps})
    ourshard.save(model, optimizer, f"{root}/step")
    losses = steps(model, optimizer, range(3, 5))
    with torch.inference_mode():
        ourshard.load(model, optimizer, f"{root}/step")
    return losses, steps(model, optimizer, range(3, 5))


def test_it_can_be_called_in_inference_mode_and_refuses_what_it_cannot_write_at_once(
    ranks: Any, tmp_path: Path
) -> None:
    for losses, again in ranks(2)(save_in_inference_mode, str(tmp_path)):
        assert losses == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "step"]


ENDING = """
import sys, time, ourshard
from torch import nn
from ourshard.checkpoint.io import DiskIO

class Slow(DiskIO):
    def flush(self, file):
        time.sleep(0.3)
        super().flush(file)

model = ourshard.shard_model(nn.Linear(5, 3), {"stage": 3, "checkpoint": {"asynchronous": True}})
ourshard.save(model, None, sys.argv[1], io=Slow())
"""


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDING, str(tmp_path / "last")], check=True, timeout=90)
    with detect(tmp_path / "last") as source:
        assert all(problem is None for _, problem in source.verify_files())


FAILING = """
import errno, sys, ourshard
from torch import nn
from ourshard.checkpoint.io import DiskIO

class Full(DiskIO):
    def flush(self, file):
        raise OSError(errno.ENOSPC, "No space left on device")

model = ourshard.shard_model(nn.Linear(5, 3), {"stage": 3, "checkpoint": {"asynchronous": True}})
ourshard.save(model, None, sys.argv[1], io=Full())
print("the end")
"""


def test_the_exit_code_says_that_the_last_save_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING, str(tmp_path / "last")]
    done = subprocess.run(command, check=False, timeout=90, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "the end\n"
    told = "ourshard: background save: writing last: OSError: [Errno 28] No space left on device (on rank 0). No "
    assert told in done.stderr


def save_three_states(folder: str) -> tuple[list[float], list[float]]:
    from tests.integrations import test_saving

    accelerator, *parts = test_saving.prepared(in_background({"stage": 3}, keep=2))
    for number in range(3):
        test_saving.steps(accelerator, *parts, range(number, number + 1))
        accelerator.save_state(f"{folder}/step-{number}")
    losses = test_saving.steps(accelerator, *parts, range(3, 5))
    accelerator.load_state(f"{folder}/step-2")
    return losses, test_saving.steps(accelerator, *parts, range(3, 5))


def test_save_state_writes_in_the_background_and_then_removes_old_ones(ranks: Any, tmp_path: Path) -> None:
    for losses, again in ranks(2)(save_three_states, str(tmp_path)):
        assert losses == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
