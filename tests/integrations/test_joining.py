"""Ranks that run out of batches go on answering; the result is that of one process where they give zeros (I06)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from tests.integrations.tiny import adamw, halving, rows, tiny

pytestmark = pytest.mark.ranks

EXAMPLES = 20  # in batches of 4 on 2 ranks: 3 batches for rank 0, 2 for rank 1


def join(config: dict[str, Any], **loop: Any) -> dict[str, Any]:
    """Train two epochs on an uneven number of batches inside `join_uneven_inputs`."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config))
    model = tiny()
    optimizer = adamw(model)
    scheduler = halving(optimizer)
    data = DataLoader(Subset(rows(), range(EXAMPLES)), batch_size=4)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(loop.get("epochs", 1)):
            for inputs, labels in data:
                batches += 1
                if loop.get("evaluate"):
                    with torch.no_grad():
                        model(inputs)
                with accelerator.no_sync(model) if loop.get("wait") else contextlib.nullcontext():
                    accelerator.backward(F.cross_entropy(model(inputs), labels))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                (model if loop.get("zero_by_model") else optimizer).zero_grad()
    after = F.cross_entropy(model(rows()[:8][0]), rows()[:8][1]).item()  # the engine is in order again
    return {
        "batches": batches,
        "state": accelerator.get_state_dict(model),
        "lr": scheduler.get_last_lr(),
        "after": after,
    }


def plain_join() -> dict[str, Any]:
    """The same in one process: each step is the mean over two ranks, of which one may have nothing."""
    model, data = tiny(), rows()
    optimizer = adamw(model)
    scheduler = halving(optimizer)
    for parts in [(0, 4), (8, 12), (16,)]:
        for first in parts:
            inputs, labels = data[first : first + 4]
            (F.cross_entropy(model(inputs), labels) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        scheduler.step()  # accelerate steps a scheduler once a process
        optimizer.zero_grad()
    return {"state": dict(model.state_dict()), "lr": scheduler.get_last_lr()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_without_batches_gives_zeros_and_keeps_its_shard_current(ranks, stage):
    results, expected = ranks(2)(join, {"stage": stage}), plain_join()
    assert [result["batches"] for result in results] == [3, 2]
    assert results[0]["lr"] == results[1]["lr"] == expected["lr"]
    assert results[0]["after"] == results[1]["after"]
    for result in results:
        for name, value in expected["state"].items():
            torch.testing.assert_close(result["state"][name], value, atol=1e-5, rtol=0, msg=name)


def test_evaluation_and_zeroing_by_the_model_are_answered_too(ranks):
    results = ranks(2)(join, {"stage": 3, "persist_below": 0}, evaluate=True, zero_by_model=True)
    for result in results:
        for name, value in plain_join()["state"].items():
            torch.testing.assert_close(result["state"][name], value, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_wait_are_reduced_for_the_step_on_all_ranks(ranks, stage):
    results = ranks(2)(join, {"stage": stage, "persist_below": 100}, wait=True)
    for result in results:
        for name, value in plain_join()["state"].items():
            torch.testing.assert_close(result["state"][name], value, atol=1e-5, rtol=0, msg=name)


def test_a_rank_without_batches_gathers_as_the_others_do_coded_or_exact(ranks):
    config = {"stage": 3, "persist_below": 0, "communication": {"weights": "int8", "block": 16}}
    without, looking = ranks(2)(join, config), ranks(2)(join, config, evaluate=True)
    for got, wanted in zip(looking, without, strict=True):
        assert all(torch.equal(value, wanted["state"][name]) for name, value in got["state"].items())


def test_three_ranks_leave_one_after_the_other(ranks):
    results = ranks(3)(join, {"stage": 3})
    assert [result["batches"] for result in results] == [2, 2, 1]
    for name, value in results[0]["state"].items():
        assert torch.equal(value, results[2]["state"][name])


@pytest.mark.slow
def test_a_secondary_shard_is_left_alone_inside_of_a_join(ranks):
    config = {"stage": 3, "persist_below": 0}
    without, with_one = ranks(4)(join, config), ranks(4)(join, {**config, "secondary_shard_size": 2})
    assert [result["batches"] for result in with_one] == [2, 1, 1, 1]
    for got, wanted in zip(with_one, without, strict=True):
        assert got["after"] == wanted["after"]
        assert all(torch.equal(value, wanted["state"][name]) for name, value in got["state"].items())


def join_apart() -> None:
    """Sync on one rank and not on the other: their backward passes cannot be one."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model = accelerator.prepare(tiny())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        loss = model(torch.ones(2, 31)).sum()
        if accelerator.process_index == 0:
            with accelerator.no_sync(model):
                loss = model(torch.ones(2, 31)).sum()
        else:
            loss = model(torch.ones(2, 31)).sum()
        loss.backward()


def test_ranks_with_work_that_part_are_told_so_and_do_not_hang(ranks):
    with pytest.raises(AssertionError, match="The ranks are in different places"):
        ranks(2)(join_apart)


def unprepared_scheduler() -> None:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model = tiny()
    optimizer = adamw(model)
    scheduler = halving(optimizer)
    data = DataLoader(Subset(rows(), range(EXAMPLES)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, labels in data:
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def test_learning_rates_that_part_are_refused_on_every_rank(ranks):
    with pytest.raises(AssertionError, match="Prepare the scheduler") as caught:
        ranks(2)(unprepared_scheduler)
    assert [failure.type_name for failure in caught.value.failures] == ["ValueError", "ValueError"]


def statistics_of_a_rank_alone() -> list[float]:
    """Train on two batches where rank 0 has but the first; return what a batch norm remembers after each."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 2}))
    norm = torch.nn.BatchNorm1d(3, momentum=1.0)
    model = accelerator.prepare(torch.nn.Sequential(norm, torch.nn.Linear(3, 3)))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for number in range(1 + dist.get_rank()):
            accelerator.backward(model(torch.full((4, 3), 10.0 * number + dist.get_rank())).sum())
    return norm.running_mean.tolist()


def test_statistics_of_a_batch_norm_go_on_where_rank_0_has_run_out_of_batches(ranks):
    assert ranks(2)(statistics_of_a_rank_alone) == [[pytest.approx(11.0)] * 3] * 2
