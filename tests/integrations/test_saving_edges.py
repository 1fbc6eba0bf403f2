"""Saves that go wrong half-way, folders that are links, names that are odd, working folders that change."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.test_saving import FULL, prepared, steps

pytestmark = pytest.mark.ranks


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def limited(root: str, config: dict[str, Any]) -> tuple[list[str], list[str], list[float], list[float]]:
    """Save with a limit of one; fail the second save; load; save a third time. Return what was there after each."""
    import torch.distributed as dist
    from accelerate.utils import ProjectConfiguration
    from ourshard.checkpoint import commit
    from ourshard.integrations import optimizer_state

    naming = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=1)
    accelerator, *parts = prepared({"stage": 3, **config}, project_config=naming)
    folder = Path(root, "checkpoints")
    steps(accelerator, *parts, range(2))
    accelerator.save_state()
    losses = steps(accelerator, *parts, range(2, 4))
    publish, gather = commit.publish, optimizer_state.gather
    commit.publish = optimizer_state.gather = full_disk  # type: ignore[assignment]
    with pytest.raises((OSError, ValueError), match="No space left"):
        accelerator.save_state()
    commit.publish, optimizer_state.gather = publish, gather
    dist.barrier()
    failed = sorted(path.name for path in folder.iterdir())
    accelerator.load_state()
    again = steps(accelerator, *parts, range(2, 4))
    accelerator.save_state()
    dist.barrier()
    assert accelerator.project_configuration.total_limit == 1
    return failed, sorted(path.name for path in folder.iterdir()), losses, again


@pytest.mark.parametrize("config", [{}, FULL], ids=["rows", "whole"])
def test_the_last_good_one_stays_until_the_new_one_is_complete(
    ranks: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    """CASES A05: accelerate's own total_limit removes it first."""
    for failed, left, losses, again in ranks(2)(limited, str(tmp_path), config):
        assert failed == ["checkpoint_0", "checkpoint_1"]
        assert left == ["checkpoint_1", "checkpoint_2"]  # what was not finished is not counted, and stays
        assert again == losses


def whole_on_a_full_disk(root: str) -> list[str]:
    """Save whole while rank 0's disk is full for the model, then for the optimizer; then with room."""
    from accelerate import checkpointing

    accelerator, *parts = prepared({"stage": 3, **FULL})
    steps(accelerator, *parts, range(1))
    told = []
    for place in (checkpointing, accelerator):  # one's `save` writes the model, the other's the optimizer
        save = place.save
        if accelerator.is_main_process:
            place.save = full_disk
        with pytest.raises((OSError, ValueError), match="No space left") as error:
            accelerator.save_state(root)
        place.save = save
        told.append(str(error.value))
    accelerator.save_state(root)
    accelerator.load_state(root)
    return told


def test_a_whole_save_that_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path) -> None:
    """Once the others went on alone, and all ranks were told that they were in different places."""
    for told in ranks(2)(whole_on_a_full_disk, str(tmp_path), timeout=60):
        assert len(told) == 2


def without_rows(root: str) -> tuple[list[float], list[float]]:
    """Save whole, and load, a group of which rank 1 has no rows in one unit; return losses that follow each."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    plugin = ShardPlugin({"stage": 3, "persist_below": 0, **FULL})
    accelerator = Accelerator(ourshard_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (1, 2)]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.1))

    def steps() -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(model(torch.ones(2, 5)).square().sum())
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    steps()
    accelerator.save_state(root)
    after = steps()
    accelerator.load_state(root)
    loaded = steps()
    accelerator.free_memory()
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (1, 2)]
    accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"SGD has .*momentum.*: the state is of another kind of optimizer"):
        accelerator.load_state(root)
    return after, loaded


def test_a_group_of_which_a_rank_has_no_rows_comes_back_from_a_whole_save(ranks: Any, tmp_path: Path) -> None:
    for saved, loaded in ranks(2)(without_rows, str(tmp_path), timeout=60):
        assert saved == loaded


def saved_with_lower_numbers(root: str) -> list[list[str]]:
    """Keep one; save numbers that are below what an earlier run, or another series, has left."""
    import torch.distributed as dist

    accelerator, *_ = prepared({"stage": 3, "checkpoint": {"keep": 1}})
    told = []
    for name in ("step_100", "epoch_1", "epoch_2"):
        accelerator.save_state(f"{root}/{name}")
        dist.barrier()
        told.append(sorted(path.name for path in Path(root).iterdir()))
    return told


def test_what_was_just_saved_stays_whatever_its_number(ranks: Any, tmp_path: Path) -> None:
    """It was removed as soon as it was complete."""
    for told in ranks(2)(saved_with_lower_numbers, str(tmp_path)):
        assert told == [["step_100"], ["epoch_1", "step_100"], ["epoch_2", "step_100"]]


def grown(root: str) -> dict[str, Any]:
    """Save; load before `prepare`, with an option that nothing takes, and into a model that has grown since."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from ourshard import ShardPlugin

    def made(layers: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(layers)
        naming = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
        plugin = ShardPlugin({"stage": 3, "persist_below": 0})
        accelerator = Accelerator(ourshard_plugin=plugin, project_config=naming)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)))
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(accelerator: Any, model: Any, optimizer: Any) -> None:
        accelerator.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        optimizer.zero_grad()

    accelerator, model, optimizer = made(2)
    step(accelerator, model, optimizer)
    accelerator.save_state()
    saved = accelerator.get_state_dict(model)
    folder = f"{root}/checkpoints/checkpoint_0"
    with pytest.raises(ValueError, match="no model is prepared"):
        Accelerator(ourshard_plugin=ShardPlugin({"stage": 3})).load_state(folder)
    with pytest.raises(ValueError, match="without assign"):
        accelerator.load_state(folder, assign=True)
    larger = made(3)
    with pytest.raises(ValueError, match=r"missing: 2\.weight, 2\.bias"):
        larger[0].load_state()
    larger[0].load_state(strict=False)
    now = larger[0].get_state_dict(larger[1])
    same = [name for name in saved if torch.equal(saved[name], now[name])]
    step(*larger)
    counts = sorted(state["step"].item() for state in larger[2].state.values())
    larger[0].save_state()
    larger[0].wait_for_everyone()
    return {"same": same == list(saved), "counts": counts, "folders": sorted(os.listdir(f"{root}/checkpoints"))}


def test_a_grown_model_takes_what_is_there_and_numbers_go_on(ranks: Any, tmp_path: Path) -> None:
    """`strict=False` was ignored, a call before `prepare` loaded nothing, and the next save met its own folder."""
    for told in ranks(2)(grown, str(tmp_path), timeout=60):
        assert told["same"]
        assert set(told["counts"]) == {1.0, 2.0}
        assert told["folders"] == ["checkpoint_0", "checkpoint_1"]


def torn(folder: str) -> tuple[str, bool]:
    """Save over a save, and stop after accelerate's own files; load."""
    from ourshard.checkpoint import running

    accelerator, *parts = prepared({"stage": 3})
    accelerator.register_for_checkpointing(Place(3))
    steps(accelerator, *parts, range(1))
    accelerator.save_state(folder)
    steps(accelerator, *parts, range(1, 2))
    write, running.write = running.write, full_disk  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        accelerator.save_state(folder)
    running.write = write
    accelerator.wait_for_everyone()
    before = accelerator.get_state_dict(parts[0])
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        accelerator.load_state(folder)
    after = accelerator.get_state_dict(parts[0])
    return str(error.value), all(torch.equal(before[name], after[name]) for name in before)


def test_files_of_one_save_with_the_rows_of_another_are_refused(ranks: Any, tmp_path: Path) -> None:
    for error, same in ranks(2)(torn, str(tmp_path / "state")):
        assert "scheduler.bin is damaged, or was changed" in error
        assert same


class Place:
    """An object of the script that is registered for checkpointing."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seen": torch.arange(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = len(state["seen"])


def resumed_in_the_data(folder: str, safe: bool, config: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Stop in the middle of an epoch of a shuffled, stateful loader; go on in a new Accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from ourshard import ShardPlugin
    from torch.utils.data import DataLoader

    from tests.integrations.tiny import adamw, rows, tiny

    def made() -> tuple[Any, ...]:
        AcceleratorState._reset_state()
        set_seed(5)
        stateful = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
        accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, **config}), dataloader_config=stateful)
        model = tiny()
        optimizer = adamw(model)
        place = Place(0)
        accelerator.register_for_checkpointing(place)
        loader = DataLoader(rows(), batch_size=4, shuffle=True)
        return accelerator, place, *accelerator.prepare(model, optimizer, loader)

    def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, stop: Callable[[int], bool]) -> list[float]:
        losses = []
        for number, (inputs, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if stop(number):
                accelerator.save_state(folder, safe)
        return losses

    accelerator, place, model, optimizer, loader = made()
    place.step = 2
    whole = train(accelerator, model, optimizer, loader, lambda number: number == 1)
    accelerator.wait_for_everyone()
    accelerator, place, model, optimizer, loader = made()
    accelerator.load_state(folder)
    return whole, train(accelerator, model, optimizer, loader, lambda number: False), place.step


@pytest.mark.parametrize(("safe", "config"), [(True, {}), (False, FULL)], ids=["rows", "whole and pickled"])
def test_a_stateful_loader_and_registered_objects_go_on_where_they_were(
    ranks: Any, tmp_path: Path, safe: bool, config: dict[str, Any]
) -> None:
    pytest.importorskip("torchdata")
    for whole, rest, step in ranks(2)(resumed_in_the_data, str(tmp_path / "a state"), safe, config):
        assert step == 2
        assert rest == whole[2:]


class Odd(nn.Module):
    """Parameters that have odd names, and none or few elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_parameter("a/b c", nn.Parameter(torch.randn(5, 3)))
        self.register_parameter("größe", nn.Parameter(torch.tensor(2.0)))
        self.register_parameter("none", nn.Parameter(torch.randn(0, 4)))
        self.register_parameter("one", nn.Parameter(torch.randn(1)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        own = dict(self.named_parameters())
        return rows @ own["a/b c"] * own["größe"] + own["one"] + own["none"].sum()


def odd_places(root: str) -> list[str]:
    """Save under odd names, over links and files, while the working folder changes."""
    import ourshard
    import torch.distributed as dist

    rank = dist.get_rank()
    os.chdir(root)
    model = ourshard.shard_model(Odd(), {"stage": 3, "persist_below": 0, "checkpoint": {"asynchronous": True}})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    ourshard.save(model, optimizer, "ein Ordner/für 1.")
    os.chdir("/")
    ourshard.wait_for_save()
    dist.barrier()
    os.chdir(root)
    if rank == 0:
        os.symlink("ein Ordner/für 1.", "link")
        os.symlink("nowhere", "dangling")
        Path("file").write_text("old")
    dist.barrier()
    told = []
    for name in ("link", "dangling", "file"):
        with pytest.raises(ValueError if rank else FileExistsError, match="exists; a checkpoint is not written over"):
            ourshard.save(model, optimizer, name)
        ourshard.save(model, optimizer, name, replace=True)
        ourshard.wait_for_save()
        again = ourshard.shard_model(Odd(), {"stage": 1, "persist_below": 0})
        other = torch.optim.AdamW(again.parameters())
        ourshard.load(again, other, name)
        one, two = ourshard.full_state_dict(model), ourshard.full_state_dict(again)
        told += [key for key in one if not torch.equal(one[key], two[key])]
    return told


def test_odd_names_links_files_and_a_working_folder_that_changes(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2)(odd_places, str(tmp_path)) == [[], []]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ein Ordner", "link", "dangling", "file"}
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert (tmp_path / "ein Ordner" / "für 1." / "ourshard.json").is_file()


def test_a_folder_whose_replacement_a_crash_stopped_is_still_the_newest(tmp_path: Path) -> None:
    from ourshard.checkpoint.commit import newest_complete, retain

    from tests.checkpoint.making import make_state, save

    for step in (1, 2):
        save(tmp_path / f"checkpoint_{step}" / "ourshard", make_state(), 1)
    shutil.move(tmp_path / "checkpoint_2" / "ourshard", tmp_path / "checkpoint_2" / ".ourshard.replaced")
    assert newest_complete(tmp_path, inner="ourshard").path == tmp_path / "checkpoint_2"
    assert retain(tmp_path, 1, inner="ourshard") == [tmp_path / "checkpoint_1"]


def saved_over(folder: str) -> tuple[list[float], list[float]]:
    """Save whole files over a sharded checkpoint of an earlier step; return the losses after it, and after a load."""
    accelerator, *parts = prepared({"stage": 3})
    steps(accelerator, *parts, range(2))
    accelerator.save_state(folder)
    accelerator, *parts = prepared({"stage": 3, "checkpoint": {"format": "full"}})
    steps(accelerator, *parts, range(3))
    accelerator.save_state(folder)
    losses = steps(accelerator, *parts, range(3, 5))
    accelerator.load_state(folder)
    return losses, steps(accelerator, *parts, range(3, 5))


def test_whole_files_that_are_saved_over_a_sharded_checkpoint_are_what_loads(ranks, tmp_path):
    for losses, again in ranks(2)(saved_over, str(tmp_path / "state")):
        assert again == pytest.approx(losses, rel=1e-6)


def saved_after_a_failure(root: str) -> list[str]:
    """Let a hook fail a save once; return the checkpoints after the next."""
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
    accelerator, *parts = prepared({"stage": 3}, project_config=naming)
    steps(accelerator, *parts, range(1))

    def fail(*_: Any) -> None:
        raise OSError("no room")

    handle = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(OSError, match="no room"):
        accelerator.save_state()
    handle.remove()
    accelerator.save_state()
    return sorted(path.name for path in Path(root, "checkpoints").iterdir())


def test_a_save_that_failed_takes_its_number_with_it_and_the_next_one_goes_on(ranks, tmp_path):
    assert "checkpoint_1" in ranks(2)(saved_after_a_failure, str(tmp_path))[0]
