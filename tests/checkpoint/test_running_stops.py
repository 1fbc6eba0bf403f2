"""Saves of a running model that are killed at any operation, or called by one rank alone; and reading it whole."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.io import DiskIO
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
    (stops,) = ranks(1)(kill_everywhere, str(tmp_path), lose)
    assert stops > 20
    with detect(tmp_path / "step-2") as source:
        assert all(problem is None for _, problem in source.verify_files())


def replace_and_die(root: str) -> list[int]:
    """Let saves over one name die at each of their operations; load that name each time, and return its steps."""
    import ourshard

    model, optimizer = made({"stage": 3, "persist_below": 0})
    steps(model, optimizer, range(1))
    ourshard.save(model, optimizer, f"{root}/last", client_state={"step": 1})
    found = []
    for stop in range(1, 1000):
        try:
            ourshard.save(model, optimizer, f"{root}/last", client_state={"step": 2}, replace=True, io=CrashIO(stop))
        except Killed:
            found.append(ourshard.load(model, optimizer, f"{root}/last")["step"])
            if found[-1] == 2:
                break
    return found


def test_a_name_that_is_saved_over_loads_wherever_a_save_dies(ranks: Any, tmp_path: Path) -> None:
    (found,) = ranks(1)(replace_and_die, str(tmp_path))
    assert found[-1] == 2
    assert set(found[:-1]) == {1}
    assert len(found) > 20


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
    """CASES A08."""
    for told in ranks(2)(save_on_rank_0, str(tmp_path)):
        assert "save: making alone" in told
        assert "reading all parameters" in told
    assert not (tmp_path / "alone").exists()


def give_the_optimizer_on_rank_0(root: str) -> str:
    import ourshard
    import torch.distributed as dist

    model, optimizer = made({"stage": 3, "persist_below": 0})
    steps(model, optimizer, range(1))
    with pytest.raises(RuntimeError) as error:
        ourshard.save(model, optimizer if dist.get_rank() == 0 else None, f"{root}/half")
    return str(error.value)


def test_ranks_that_give_other_optimizers_are_told_before_half_of_the_state_is_saved(
    ranks: Any, tmp_path: Path
) -> None:
    for told in ranks(2)(give_the_optimizer_on_rank_0, str(tmp_path)):
        assert "save: writing half (optimizers: 1)" in told
        assert "save: writing half (optimizers: 0)" in told
    assert not list(tmp_path.iterdir())


def read_whole(stage: int) -> tuple[list[str], bool]:
    import ourshard

    model, _ = made({"stage": stage, "persist_below": 100})
    whole = ourshard.full_state_dict(model)
    found = dict(ourshard.iter_full_parameters(model))
    return list(found), all(torch.equal(value, whole[name]) for name, value in found.items())


def test_parameters_are_read_whole_one_by_one_under_the_names_of_the_model(ranks: Any) -> None:
    """CASES X07, I13."""
    wanted = {name for name, _ in Odd().named_parameters()}
    for names, equal in ranks(2)(read_whole, 3):
        assert equal
        assert set(names) == wanted
        assert len(names) == len(wanted)


def read_with_ignored(root: str) -> tuple[list[str], list[str], str]:
    """Read parameters of which some are ignored; load them whole; load a buffer of another shape."""
    import ourshard

    def sharded() -> Any:
        return ourshard.shard_model(Odd(), {"stage": 3, "persist_below": 100, "wrap": {"ignore": ["middle"]}})

    model, again = sharded(), sharded()
    whole = ourshard.full_state_dict(model)
    with torch.no_grad():
        again.middle[0].weight.zero_()
    ourshard.load_full_state_dict(again, whole)
    other = [name for name, value in ourshard.full_state_dict(again).items() if not torch.equal(value, whole[name])]
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        ourshard.load_full_state_dict(again, {**whole, "seen": torch.ones(1)})
    return [name for name, _ in ourshard.iter_full_parameters(model)], other, str(error.value)


def test_parameters_that_are_ignored_are_read_and_loaded_whole_too(ranks: Any, tmp_path: Path) -> None:
    """An inference engine has to get all of the model; they were refused as unexpected where a whole model loads."""
    wanted = sorted(name for name, _ in Odd().named_parameters())
    for names, other, told in ranks(2)(read_with_ignored, str(tmp_path)):
        assert sorted(names) == wanted
        assert not other
        assert "of another shape: seen: (1,) given, () wanted" in told


def save_while_writing(root: str) -> bool:
    """Save, read and load where `gathered` is about to write; return whether what was written is there after it."""
    import ourshard

    model, optimizer = made({"stage": 3, "persist_below": 0})
    before = ourshard.full_state_dict(model)
    actions = (
        lambda: ourshard.save(model, optimizer, root),
        lambda: ourshard.full_state_dict(model),
        lambda: list(ourshard.iter_full_parameters(model)),
        lambda: ourshard.load_full_state_dict(model, before),
        lambda: ourshard.load(model, optimizer, root),
    )
    with ourshard.gathered(model, writeback=True):
        with torch.no_grad():
            model.get_parameter("late.weight").add_(1)
        for action in actions:
            with pytest.raises(RuntimeError, match="until the block ends"):
                action()
    return torch.equal(ourshard.full_state_dict(model)["late.weight"], before["late.weight"] + 1)


def test_what_gathered_is_about_to_write_is_not_left_out_of_a_save(ranks: Any, tmp_path: Path) -> None:
    """Values of before were saved and read, without a word."""
    assert ranks(2)(save_while_writing, str(tmp_path / "none")) == [True, True]
    assert not list(tmp_path.iterdir())


def counted(root: str, layers: int) -> tuple[int, int, float]:
    """Save and load; return the gathers of objects of each, and the bytes that a load read for one saved."""
    import ourshard
    import torch.distributed as dist
    from ourshard.checkpoint.pieces import FilePool
    from torch import nn

    gathers: list[int] = []
    nbytes = 0
    gather, read_into = dist.all_gather_object, FilePool.read_into

    def counting_gather(*args: Any, **kwargs: Any) -> None:
        gathers.append(1)
        gather(*args, **kwargs)

    def counting_read(pool: FilePool, name: str, begin: int, target: memoryview) -> None:
        nonlocal nbytes
        nbytes += target.nbytes
        read_into(pool, name, begin, target)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
    ourshard.shard_model(model, {"stage": 3, "persist_below": 0, "wrap": {"classes": ["Linear"]}})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    dist.all_gather_object, FilePool.read_into = counting_gather, counting_read  # type: ignore[method-assign]
    try:
        ourshard.save(model, optimizer, root)
        saving = len(gathers)
        ourshard.load(model, optimizer, root)
    finally:
        dist.all_gather_object, FilePool.read_into = gather, read_into  # type: ignore[method-assign]
    return saving, len(gathers) - saving, nbytes / (layers * 64 * 64 * 4 * 3)


def test_a_save_plans_without_words_and_a_load_reads_no_other_rank_s_rows(ranks: Any, tmp_path: Path) -> None:
    """CASES A18 and A14: three agreements a save and two a load, whatever the model; each rank reads its own rows.

    It reads them twice, with those of its share of the hashes: together the half of the files on two ranks.
    """
    few = ranks(2)(counted, str(tmp_path / "few"), 2)
    many = ranks(2)(counted, str(tmp_path / "many"), 30)
    for saving, loading, _ in [*few, *many]:
        assert (saving, loading) == (3, 2)
    for _, _, share in many:
        assert 0.95 < share < 1.1


class Slow(DiskIO):
    """Takes longer for the first flush than a collective may wait."""

    def __init__(self) -> None:
        self.slept = False

    def flush(self, file: BinaryIO) -> None:
        if not self.slept:
            time.sleep(6)
            self.slept = True
        super().flush(file)


def saved_slowly(root: str) -> bool:
    import ourshard
    import torch.distributed as dist

    model, optimizer = made({"stage": 3, "persist_below": 0, "timeout": 5.0})
    steps(model, optimizer, range(1))
    ourshard.save(model, optimizer, f"{root}/slow", io=Slow() if dist.get_rank() == 1 else DiskIO())
    steps(model, optimizer, range(1, 2))
    return (Path(root) / "slow" / "ourshard.json").is_file()


def test_a_disk_that_takes_longer_than_a_collective_may_wait_stops_nothing(ranks: Any, tmp_path: Path) -> None:
    """CASES A09."""
    assert ranks(2)(saved_slowly, str(tmp_path)) == [True, True]
