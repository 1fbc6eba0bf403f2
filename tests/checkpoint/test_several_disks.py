"""CASES A16: each machine has a disk of its own. Ranks with folders of their own stand for machines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ourshard.checkpoint.source import detect

from tests.checkpoint.test_running import HYBRID, assert_same_bits, contents, made, steps

pytestmark = pytest.mark.ranks


def place(root: str, per_node: int) -> Path:
    """Return the disk of this rank's machine."""
    from ourshard.checkpoint import disks

    disks.VISIBLE_WITHIN = 0.3
    folder = Path(root) / f"node{dist.get_rank() // per_node}"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    return folder


def save_and_go_on(root: str, per_node: int, config: dict[str, Any], asynchronous: bool) -> tuple[list[float], ...]:
    """Save into one folder for all and on each machine, twice; load the latter, and train again."""
    import ourshard

    own = place(root, per_node)
    model, optimizer = made({**config, "checkpoint": {"asynchronous": asynchronous}})
    steps(model, optimizer, range(2))
    ourshard.save(model, optimizer, own / "step", client_state={"epoch": 2})
    steps(model, optimizer, range(2, 3))
    ourshard.save(model, optimizer, f"{root}/shared", client_state={"epoch": 3})
    ourshard.save(model, optimizer, own / "step", client_state={"epoch": 3}, replace=True)
    losses = steps(model, optimizer, range(3, 5))
    model, optimizer = made(config)
    assert ourshard.load(model, optimizer, own / "step") == {"epoch": 3}
    return losses, steps(model, optimizer, range(3, 5))


def copied_into_one(root: Path, target: Path) -> Path:
    for node in sorted(root.glob("node*")):
        shutil.copytree(node / "step", target, dirs_exist_ok=True)
    return target


def assert_holds_the_same(one: Path, other: Path) -> None:
    with detect(one) as first, detect(other) as second:
        before, after = contents(first), contents(second)
        assert all(problem is None for _, problem in second.verify_files())
        for name in ("param_groups", "param_state", "ties", "step", "frozen", "client_state"):
            assert getattr(first.description, name) == getattr(second.description, name), name
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert_same_bits(value, after[key], str(key))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("config", [{"stage": 3, "persist_below": 0}, {"stage": 1, "persist_below": 100}])
def test_each_disk_gets_the_rows_of_its_ranks_and_all_go_on_from_them(
    ranks: Any, tmp_path: Path, config: dict[str, Any], asynchronous: bool
) -> None:
    for losses, again in ranks(2)(save_and_go_on, str(tmp_path), 1, config, asynchronous):
        assert losses == again
    assert sorted(path.name for path in (tmp_path / "node1").iterdir()) == ["step"]
    assert_holds_the_same(tmp_path / "shared", copied_into_one(tmp_path, tmp_path / "together"))


@pytest.mark.slow  # four ranks
def test_replicas_on_two_machines_have_a_whole_copy_each(ranks: Any, tmp_path: Path) -> None:
    for losses, again in ranks(4)(save_and_go_on, str(tmp_path), 2, HYBRID, False):
        assert losses == again
    assert_holds_the_same(tmp_path / "shared", copied_into_one(tmp_path, tmp_path / "together"))


def refused(root: str, what: str) -> tuple[str, bool]:
    """Save on two disks, spoil that, and load; return the error, and whether the weights stayed."""
    import ourshard

    own = place(root, 1)
    model, optimizer = made({"stage": 3, "persist_below": 0})
    steps(model, optimizer, range(1))
    ourshard.save(model, optimizer, own / "older")
    steps(model, optimizer, range(1, 2))
    ourshard.save(model, optimizer, own / "step")
    source = own / "step"
    if what == "swapped":
        source = Path(root) / f"node{1 - dist.get_rank()}" / "step"
    if what == "another save" and dist.get_rank() == 1:
        shutil.rmtree(source)
        (own / "older").rename(source)
    if what == "gone" and dist.get_rank() == 1:
        shutil.rmtree(source)
    dist.barrier()
    before = ourshard.full_state_dict(model)
    with pytest.raises(ValueError, match="step") as error:
        ourshard.load(model, optimizer, source)
    after = ourshard.full_state_dict(model)
    return str(error.value), all(bool((before[name] == after[name]).all()) for name in before)


WORDS = {
    "swapped": "rows that this rank needs are not on its disk: .* of rank [01]",
    "another save": "are of different saves: ranks .0. of step 2, ranks .1. of step 1",
    "gone": "has no ourshard.json: it is no checkpoint of ourshard, or its save did not finish",
}


@pytest.mark.parametrize("what", WORDS)
def test_rows_that_are_on_another_disk_are_named_on_all_ranks_and_nothing_is_loaded(
    ranks: Any, tmp_path: Path, what: str
) -> None:
    import re

    for error, same in ranks(2)(refused, str(tmp_path), what):
        assert re.search(WORDS[what], error), error
        assert same


def save_state_on_each(root: str, each: bool, by_config: bool = False) -> tuple[list[float], list[float]]:
    """Save and load with an Accelerator on two machines of one rank."""
    import os

    from accelerate.utils import ProjectConfiguration

    from tests.integrations import test_saving

    own = place(root, 1)
    os.environ["LOCAL_RANK"] = "0"
    project = ProjectConfiguration(project_dir=str(own), save_on_each_node=each and not by_config)
    config = {"stage": 3, "checkpoint": {"save_on_each_node": by_config}}
    accelerator, *parts = test_saving.prepared(config, project_config=project)
    test_saving.steps(accelerator, *parts, range(2))
    accelerator.save_state(str(own / "state"))
    losses = test_saving.steps(accelerator, *parts, range(2, 4))
    accelerator.load_state(str(own / "state"))
    return losses, test_saving.steps(accelerator, *parts, range(2, 4))


@pytest.mark.parametrize("by_config", [False, True])
def test_save_state_writes_on_each_node_where_that_is_asked_for(ranks: Any, tmp_path: Path, by_config: bool) -> None:
    for losses, again in ranks(2)(save_state_on_each, str(tmp_path), True, by_config):
        assert losses == again


def test_save_state_on_several_disks_says_what_to_ask_for(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="or set save_on_each_node") as caught:
        ranks(2)(save_state_on_each, str(tmp_path), False)
    assert {failure.type_name for failure in caught.value.failures} == {"ValueError"}
