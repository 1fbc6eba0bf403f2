"""Masters and moments in files: the numbers of training on the device, the bytes by kind, and what faults lead to."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch

from tests.commands import ROOT, clean_environment
from tests.ranks.nets import llama, square_loss, token_loss, tokens, toy
from tests.ranks.pairs import joined, part
from tests.ranks.test_lane_step import Counted, same
from tests.ranks.test_offload import BF16, saved, write_and_read
from tests.ranks.test_optimizers import KINDS, make_optimizer
from tests.ranks.training import Task, adamw, train

pytestmark = pytest.mark.ranks

BLOCK = 4096


def disk(folder: Any, **more: str) -> dict[str, str]:
    return {"optimizer": "nvme", "nvme_path": str(folder), **more}


def some_kinds(folder: str, kinds: list[str]) -> None:
    here = {"stage": 3, "persist_below": 20}
    for kind in kinds:
        counts = same(here, {**here, "offload": disk(folder)}, lambda p, k=kind: make_optimizer(k, p), steps=3)
        assert all(count > 3 for count in counts), f"{kind}: not by lane"
    counts = same(here, {**here, "offload": disk(folder)}, Counted, steps=3)  # nobody's but the user's
    assert all(count > 3 for count in counts)


def test_an_optimizer_with_any_number_of_states_rests_on_the_disk(ranks, tmp_path):
    ranks(2)(some_kinds, str(tmp_path), ["SGD", "SGD nesterov", "Adam", "ASGD"])


@pytest.mark.slow
def test_every_optimizer_of_torch_rests_on_the_disk(ranks, tmp_path):
    ranks(2)(some_kinds, str(tmp_path), list(KINDS))


def with_gaps(config: dict[str, Any]) -> Any:
    """Train with gradients missing now and then, so that runs are split and lanes are skipped."""
    from ourshard import full_state_dict, shard_model

    model = shard_model(toy(), {**config, "stage": 3, "persist_below": 0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        square_loss(model, part(joined(step))).backward()
        for number, parameter in enumerate(model.parameters()):
            if step == 1 and number == 2:
                parameter.grad = None  # one of a run
            if step == 2 and number >= 2:
                parameter.grad = None  # all lanes of later units
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


def test_runs_that_are_split_and_lanes_without_gradient_keep_their_state(ranks, tmp_path):
    here, there = ranks(2)(with_gaps, {}), ranks(2)(with_gaps, {"offload": disk(tmp_path)})
    for mine, theirs in zip(here, there, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def bytes_by_kind(folder: str, params: str) -> dict[str, Any]:
    from ourshard import engine_of, shard_model

    offload = disk(folder, params=params)
    config = {"stage": 3, "persist_below": 0, "precision": BF16, "offload": offload, "ledger": True}
    model = shard_model(llama(), config)
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    assert engine.disk is not None
    optimizer = adamw(model.parameters())
    for step in range(2):
        token_loss(model, tokens(step, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [lane.layout.shard_numel for lane in engine.lanes()]
    file = engine.disk.file  # type: ignore[attr-defined]
    return {
        "held": engine.ledger.held,
        "shards": shards,
        "host": engine.host.nbytes if engine.host else 0,
        "disk": engine.disk.nbytes,
        "space": os.fstat(file._plain).st_blocks * 512,
        "used": file.used,
    }


@pytest.mark.parametrize("params", ["none", "cpu"])
def test_the_disk_has_masters_and_moments_and_the_host_gradients_and_three_windows(ranks, tmp_path, params):
    for seen in ranks(2)(bytes_by_kind, str(tmp_path), params):
        numel, held = sum(seen["shards"]), seen["held"]
        blocks = [-(-4 * shard // BLOCK) * BLOCK for shard in seen["shards"]]
        windows = min(3, len(blocks)) * 3 * max(blocks)
        on_host = 2 if params == "cpu" else 0
        assert held["disk"] == seen["disk"] == 12 * numel
        assert seen["used"] == 3 * sum(blocks)
        assert seen["used"] <= seen["space"] <= seen["used"] + 64 * BLOCK  # and blocks of the filesystem's own
        assert held["host"] == seen["host"] == (4 + on_host) * numel + windows
        assert held["shard"] == (2 - on_host) * numel
        assert held["master"] == held["gradient"] == 0


def test_writes_reach_the_files_and_go_up_again(ranks, tmp_path):
    assert ranks(2)(write_and_read, disk(tmp_path)) == [[0.5, 0.25, 2.0]] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_moves_between_disk_and_device(ranks, tmp_path, asynchronous):
    files = tmp_path / "disk"
    files.mkdir()
    checkpoint = {"asynchronous": asynchronous}
    there = {"stage": 3, "persist_below": 0, "offload": disk(files), "checkpoint": checkpoint}
    here = {"stage": 3, "persist_below": 0, "checkpoint": checkpoint}
    ranks(2)(saved, str(tmp_path / "a"), there, False)
    ranks(2)(saved, str(tmp_path / "b"), here, False)
    first, *others = [ranks(2)(saved, str(tmp_path / f), c, True) for f in "ab" for c in (here, there)]
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


# ---- faults ------------------------------------------------------------------------------------------------


def _full(file: Any) -> Any:
    """Let the disk be full from now on."""
    before, os.posix_fallocate = os.posix_fallocate, _no_space
    return lambda: setattr(os, "posix_fallocate", before)


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def _cut(file: Any) -> Any:
    os.ftruncate(file._plain, BLOCK)
    return lambda: None


def _cut_late(file: Any) -> Any:
    """Cut the file where nobody looks before the reads begin."""
    file.is_whole = lambda: True
    return _cut(file)


def _unwritable(file: Any) -> Any:
    """Forbid writes behind a few blocks of any file, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, before[1]))

    def undo() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    return undo


FAULTS = {"full": _full, "cut": _cut, "cut while read": _cut_late, "unwritable": _unwritable}
SAID = {
    "full": "No space left",
    "cut": "was cut by another process",
    "cut while read": "preadv of",
    "unwritable": "File too large",
}


def unread_while_whole(folder: str) -> str:
    """Let rank 1 fail to read its second lane in a step of whole matrices, where lanes are exchanged between ranks."""
    import torch.distributed as dist
    from ourshard import shard_model

    model = shard_model(toy(), {"stage": 3, "persist_below": 0, "offload": disk(folder)})
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    square_loss(model, part(joined(0))).backward()
    before, reads = os.preadv, [0]

    def fail_second(*args: Any) -> int:
        reads[0] += 1
        return _bad_block() if reads[0] == 2 and dist.get_rank() == 1 else before(*args)

    os.preadv = fail_second
    try:
        with pytest.raises(RuntimeError) as stepped:
            optimizer.step()
    finally:
        os.preadv = before
    return str(stepped.value)


def test_a_read_that_fails_stops_a_step_of_whole_matrices_on_all_ranks(ranks, tmp_path):
    for said in ranks(2)(unread_while_whole, str(tmp_path)):
        assert "rank 1 could not read or write" in said
        assert "Input/output error" in said


def faulty(folder: str, fault: str, target: str) -> tuple[str, str]:
    """Save, break rank 1's file, step; return the errors. What the checkpoint has is loaded and trained on."""
    import torch.distributed as dist
    from ourshard import engine_of, full_state_dict, load, save, shard_model

    def train_on(model: Any, optimizer: Any, number: int) -> None:
        square_loss(model, part(joined(number))).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = shard_model(toy(), {"stage": 3, "persist_below": 0, "offload": disk(folder)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if fault != "full":  # the space of moments is taken in the first step
        train_on(model, optimizer, 0)
    save(model, optimizer, target)
    wanted = full_state_dict(model)
    engine = engine_of(model)
    assert engine is not None
    undo = FAULTS[fault](engine.disk.file) if dist.get_rank() == 1 else None  # type: ignore[union-attr]
    try:
        with pytest.raises(RuntimeError) as stepped:
            train_on(model, optimizer, 1)
    finally:
        if undo is not None:
            undo()
    with pytest.raises(RuntimeError) as read:
        full_state_dict(model)
    again = shard_model(toy(), {"stage": 3, "persist_below": 0, "offload": disk(folder)})
    second = torch.optim.AdamW(again.parameters(), lr=1e-2)
    load(again, second, target)
    found = full_state_dict(again)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    train_on(again, second, 1)
    return str(stepped.value), str(read.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_one_rank_stops_all_with_its_words_and_the_checkpoint_goes_on(ranks, tmp_path, fault):
    files = tmp_path / "disk"
    files.mkdir()
    for stepped, read in ranks(2)(faulty, str(files), fault, str(tmp_path / "saved")):
        assert SAID[fault] in stepped
        assert "rank 1" in stepped
        assert "last checkpoint" in stepped
        assert read == stepped


def _unreadable(file: Any) -> Any:
    """Let reads fail, as those of a bad block do."""
    before, os.preadv = os.preadv, _bad_block
    return lambda: setattr(os, "preadv", before)


def _bad_block(*_: Any) -> int:
    raise OSError(5, "Input/output error")


READ_FAULTS = {"cut while read": _cut_late, "bad block": _unreadable, "unwritable": _unwritable}
READ_SAID = {"cut while read": "preadv of", "bad block": "Input/output error", "unwritable": "File too large"}


def unread(folder: str, fault: str, target: str, evaluates: bool) -> str:
    """Save, break rank 1's file of parameters, train or evaluate; go on from the checkpoint, and return the error."""
    import torch.distributed as dist
    from ourshard import engine_of, full_state_dict, load, save, shard_model

    config = {"stage": 3, "persist_below": 0, "precision": BF16}
    offload = {"optimizer": "cpu", "params": "nvme", "nvme_path": folder}

    def make() -> tuple[Any, Any]:
        model = shard_model(toy(), {**config, "offload": offload})
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_on(model: Any, optimizer: Any, number: int) -> None:
        square_loss(model, part(joined(number))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def go_on(model: Any, optimizer: Any) -> None:
        for number in range(1, 4):  # what a step could not write is missed later
            if evaluates:
                with torch.no_grad():
                    square_loss(model, part(joined(number)))
            else:
                train_on(model, optimizer, number)

    model, optimizer = make()
    train_on(model, optimizer, 0)
    save(model, optimizer, target)
    wanted = full_state_dict(model)
    engine = engine_of(model)
    assert engine is not None
    undo = READ_FAULTS[fault](engine.disk.file) if dist.get_rank() == 1 else None  # type: ignore[union-attr]
    try:
        with pytest.raises(RuntimeError) as failed:
            go_on(model, optimizer)
    finally:
        if undo is not None:
            undo()
    again, second = make()
    load(again, second, target)
    found = full_state_dict(again)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    train_on(again, second, 1)
    return str(failed.value)


@pytest.mark.parametrize(
    ("fault", "evaluates"),
    [
        ("bad block", False),
        ("bad block", True),
        pytest.param("cut while read", False, marks=pytest.mark.slow),
        pytest.param("unwritable", False, marks=pytest.mark.slow),
    ],
)
def test_parameters_that_one_rank_can_not_read_stop_all_and_the_checkpoint_goes_on(ranks, tmp_path, fault, evaluates):
    files = tmp_path / "disk"
    files.mkdir()
    for said in ranks(2)(unread, str(files), fault, str(tmp_path / "saved"), evaluates):
        assert READ_SAID[fault] in said
        assert "offload.params: nvme: rank 1" in said
        assert "last checkpoint" in said


KILLED = """
import os, signal, sys, torch
from ourshard import shard_model
from tests.ranks.nets import square_loss, toy, numbers
model = shard_model(toy(), {"stage": 3, "persist_below": 0, "offload": {"optimizer": "nvme", "nvme_path": sys.argv[1]}})
optimizer = torch.optim.AdamW(model.parameters())
square_loss(model, numbers(0, 2)).backward()
optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_nothing_in_the_folder(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, env=clean_environment(), check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def refused(config: dict[str, Any], free: int | None) -> None:
    import shutil
    from collections import namedtuple

    usage, shutil.disk_usage = shutil.disk_usage, shutil.disk_usage
    if free is not None:
        shutil.disk_usage = lambda _: namedtuple("Usage", "free")(free)  # type: ignore[assignment]
    try:
        train(Task(), config)
    finally:
        shutil.disk_usage = usage


@pytest.mark.parametrize(
    ("path", "free", "said"),
    [
        ("/nowhere/at/all", None, "/nowhere/at/all is not a folder"),
        ("/proc", None, "/proc has 0 bytes free"),
        (
            "/tmp",
            9000,
            r"8\.8 KiB free, and masters and parameters of 2 ranks take \d+\.\d KiB, with AdamW.s state \d+\.\d KiB",
        ),
    ],
)
def test_a_disk_that_can_not_serve_is_refused_before_the_model_is_sharded(ranks, path, free, said):
    """I14."""
    with pytest.raises(AssertionError, match=said) as caught:
        ranks(2)(refused, {"stage": 3, "persist_below": 0, "offload": disk(path)}, free)
    assert len(caught.value.failures) == 2


def unprivileged(folder: str) -> str:
    """Shard as a user who may not write in the folder."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(ValueError) as caught:
            train(Task(), {"stage": 3, "persist_below": 0, "offload": disk(folder)})
    finally:
        os.seteuid(before)
    return str(caught.value)


def without_a_model(folder: str) -> str:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    try:
        Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, "offload": disk(folder)}))
    except ValueError as error:
        return str(error)
    return ""


def test_a_folder_that_is_none_is_refused_before_a_model_is_there(ranks, tmp_path):
    """I14."""
    for said in ranks(2)(without_a_model, str(tmp_path / "none")):
        assert "none is not a folder; make it, on a local disk, on every machine" in said
    assert ranks(2)(without_a_model, str(tmp_path)) == ["", ""]


def test_a_folder_without_permission_is_refused(ranks):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        for said in ranks(2)(unprivileged, folder):
            assert f"no permission to write in {folder}" in said
        os.chmod(folder, 0o755)


class Counting(torch.optim.Optimizer):
    """Counts its steps once for all parameters, and steps by the count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / self.count)


def unknown(folder: str, kind: str) -> None:
    from ourshard import adopt_optimizer, shard_model

    model = shard_model(toy(), {"stage": 3, "persist_below": 0, "offload": disk(folder)})
    if kind == "closure":
        torch.optim.AdamW(model.parameters()).step(lambda: square_loss(model, joined(0)))
    else:
        adopt_optimizer(Counting(model.parameters()))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("closure", "call the closure yourself"),
        ("other", "Counting then does not do what it does at once"),
    ],
)
def test_what_does_not_step_by_lane_is_refused_on_every_rank(ranks, tmp_path, kind, said):
    with pytest.raises(AssertionError, match=said) as caught:
        ranks(2)(unknown, str(tmp_path), kind)
    assert len(caught.value.failures) == 2
