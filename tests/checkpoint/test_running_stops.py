"""Saves of a running model that are killed at any operation, or called by one rank alone; and reading it whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.source import detect

from tests.checkpoint.crashing import CrashIO, Killed
from tests.checkpoint.test_running import Odd, made, steps
from tests.commands import ROOT, run_cli

pytestmark = pytest.mark.ranks


def kill_everywhere(root: str, lose: bool) -> int:
    """Save step-1, then let step-2 die at each of its operations; return how many there were."""
    import ourshard

    model, optimizer = made({"stage": 3, "persist_below": 0})
    steps(model, optimizer, range(1))
    ourshard.save(model, optimizer, f"{root}/step-1")
    stop = 0
    while True:
        stop += 1
        io = CrashIO(stop)
        try:
            ourshard.save(model, optimizer, f"{root}/step-2", replace=True, io=io)
        except Killed:
            if lose:
                io.lose()
            newest = newest_complete(Path(root), verify=True)
            assert newest.path is not None, io.log
            ourshard.load(model, optimizer, newest.path)
        else:
            return stop - 1


@pytest.mark.parametrize("lose", [False, True], ids=["process", "power"])
def test_a_save_killed_at_any_operation_leaves_a_checkpoint_that_loads(ranks: Any, tmp_path: Path, lose: bool) -> None:
    (stops,) = ranks(1)(kill_everywhere, str(tmp_path), lose, timeout=90)
    assert stops > 20
    with detect(tmp_path / "step-2") as source:
        assert all(problem is None for _, problem in source.verify_files())


def killed(root: Path, worlds: str, every: int) -> dict[str, int]:
    """Run `killing.py` in a process of its own, which forks; tell how many left the older and the newer save."""
    command = [sys.executable, "-m", "tests.checkpoint.killing", str(root), worlds, str(every)]
    result = run_cli(command, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, timeout=900)
    told: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return told


def test_two_ranks_of_which_one_or_both_are_really_killed_leave_a_checkpoint_that_loads(tmp_path: Path) -> None:
    assert sum(killed(tmp_path, "2", 9).values()) >= 10


@pytest.mark.slow  # more than two hundred jobs
def test_one_two_and_four_ranks_killed_at_every_operation_leave_a_checkpoint_that_loads(tmp_path: Path) -> None:
    told = killed(tmp_path, "1,2,4", 1)
    assert sum(told.values()) >= 200
    assert told["newer"] >= 6


def save_on_rank_0(root: str) -> str:
    import ourshard
    import torch.distributed as dist

    def part_ways() -> None:
        if dist.get_rank() == 0:
            ourshard.save(model, optimizer, f"{root}/alone")
        ourshard.full_state_dict(model)

    model, optimizer = made({"stage": 3, "persist_below": 0})
    with pytest.raises(RuntimeError) as error:
        part_ways()
    return str(error.value)


def test_a_save_on_one_rank_alone_is_an_error_that_names_both_places(ranks: Any, tmp_path: Path) -> None:
    for told in ranks(2)(save_on_rank_0, str(tmp_path), timeout=60):
        assert "save: making alone" in told
        assert "reading all parameters" in told
    assert not (tmp_path / "alone").exists()


def read_whole(stage: int) -> tuple[list[str], bool]:
    import ourshard

    model, _ = made({"stage": stage, "persist_below": 100})
    whole = ourshard.full_state_dict(model)
    found = dict(ourshard.iter_full_parameters(model))
    return list(found), all(torch.equal(value, whole[name]) for name, value in found.items())


def test_parameters_are_read_whole_one_by_one_under_the_names_of_the_model(ranks: Any) -> None:
    wanted = {name for name, _ in Odd().named_parameters()}
    for names, equal in ranks(2)(read_whole, 3):
        assert equal
        assert set(names) == wanted
        assert len(names) == len(wanted)
