"""F06, F07, I07: more than one model in a script, teachers, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from tests.ranks.nets import Toy, numbers, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, adamw, sgd

pytestmark = pytest.mark.ranks

MIXED = [(TOY[a], TOY[b]) for a, b in (("stage 3", "stage 1"), ("stage 2", "some persist"), ("stage 0", "stage 3"))]


def other() -> Toy:
    return Toy(blocks=2, seed=1)


def adversaries(first: dict[str, Any], second: dict[str, Any]) -> None:
    """A generator and a discriminator, each with its optimizer, trained in turn; losses go through both."""
    made, judge = pair(first, toy, adamw), pair(second, other, sgd)
    for step in range(4):
        for kind in ("plain", "sharded"):
            g, d = getattr(made, kind), getattr(judge, kind)
            rows = joined(step) if kind == "plain" else part(joined(step))
            g_opt = made.plain_optimizer if kind == "plain" else made.optimizer
            d_opt = judge.plain_optimizer if kind == "plain" else judge.optimizer
            d_opt.zero_grad()
            (d(rows).square().mean() - 0.1 * d(g(rows).detach()).abs().mean()).backward()
            d_opt.step()
            g_opt.zero_grad()
            d.requires_grad_(False)
            d(g(rows)).square().mean().backward()
            d.requires_grad_(True)
            g_opt.step()
    made.assert_same()
    judge.assert_same()


@pytest.mark.parametrize("configs", MIXED, ids=str)
def test_two_models_of_two_stages_trained_in_turn_with_losses_through_both(ranks, configs):
    """F06."""
    ranks(2)(adversaries, *configs)


def one_optimizer(first: dict[str, Any], second: dict[str, Any]) -> None:
    from ourshard import full_state_dict, shard_model

    plain, sharded = (toy(), other()), (shard_model(toy(), first), shard_model(other(), second))
    optimizers = [adamw([p for m in models for p in m.parameters()]) for models in (plain, sharded)]
    for step in range(4):
        for models, optimizer, rows in (
            (plain, optimizers[0], joined(step)),
            (sharded, optimizers[1], part(joined(step))),
        ):
            optimizer.zero_grad()
            models[1](models[0](rows)).square().mean().backward()
            optimizer.step()
    for a, b in zip(sharded, plain, strict=True):
        for name, value in full_state_dict(a).items():
            torch.testing.assert_close(value, b.state_dict()[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("configs", MIXED, ids=str)
def test_one_optimizer_for_two_models(ranks, configs):
    ranks(2)(one_optimizer, *configs)


def learn_from_teacher(config: dict[str, Any]) -> dict[str, int]:
    from ourshard import engine_of, shard_model

    student = pair(config, toy, adamw)
    teachers = other().requires_grad_(False), other().requires_grad_(False)
    taught = shard_model(teachers[1], {**config, "ledger": True}).eval()
    for step in range(4):
        student.zero_grad()
        for model, teacher, rows in (
            (student.plain, teachers[0], joined(step)),
            (student.sharded, taught, part(joined(step))),
        ):
            out = model(rows)
            with torch.no_grad():
                wanted = teacher(rows)  # between the student's forward and backward
            (out - wanted).square().mean().backward()
        student.step()
    student.assert_same()
    assert not taught.training
    assert not any(module.training for module in taught.modules())
    engine = engine_of(taught)
    assert engine is not None
    return engine.ledger.peak  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_teacher_between_forward_and_backward_holds_no_gradients(ranks, stage):
    """F07."""
    for peak in ranks(2)(learn_from_teacher, {"stage": stage, "persist_below": 0}):
        assert peak["gradient"] == peak["reduce"] == 0


def follow_by_shards(config: dict[str, Any]) -> None:
    """The target network of reinforcement learning: a running mean of another model, by this rank's rows."""
    from ourshard import full_state_dict, shard_model

    online, plain_target = pair(config, toy, sgd), toy()
    target = shard_model(toy(), config)
    for step in range(3):
        online.train(1, first=step)
        with torch.no_grad():
            for a, b in zip(plain_target.parameters(), online.plain.parameters(), strict=True):
                a.data.mul_(0.9).add_(b.data, alpha=0.1)
            for a, b in zip(target.parameters(), online.sharded.parameters(), strict=True):
                a.data.mul_(0.9).add_(b.data, alpha=0.1)
        with torch.no_grad():
            torch.testing.assert_close(target(part(joined(step))), part(plain_target(joined(step))))
    for name, value in full_state_dict(target).items():
        torch.testing.assert_close(value, plain_target.state_dict()[name], atol=1e-6, rtol=0)


def average(config: dict[str, Any]) -> None:
    """The averages of torch itself: a running mean, and the mean of all steps."""
    from ourshard import full_state_dict, shard_model

    for mean in (get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn()):
        online = pair(config, toy, sgd)
        plain, sharded = (AveragedModel(toy(), multi_avg_fn=mean) for _ in range(2))
        shard_model(sharded, config)
        for step in range(3):
            online.train(1, first=step)
            plain.update_parameters(online.plain)
            sharded.update_parameters(online.sharded)
            with torch.no_grad():
                torch.testing.assert_close(sharded(part(joined(step))), part(plain(joined(step))))
        for name, value in full_state_dict(sharded).items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_averages_of_weights_that_torch_takes_are_those_of_one_process(ranks, stage):
    ranks(2)(average, {"stage": stage, "persist_below": 20})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_place_arithmetic_between_models_of_one_layout_works_on_the_ranks_rows(ranks, stage):
    """F07."""
    ranks(2)(follow_by_shards, {"stage": stage, "persist_below": 0})


def copy_before_and_after(stage: int) -> str:
    from ourshard import shard_model

    model = toy()
    twin = copy.deepcopy(model)
    shard_model(model, {"stage": stage, "persist_below": 0})
    shard_model(twin, {"stage": stage, "persist_below": 0})
    rows = numbers(0, 2)
    torch.testing.assert_close(model(rows), twin(rows))
    try:
        copy.deepcopy(model)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_copy_made_before_is_a_model_of_its_own_and_one_made_after_is_refused(ranks, stage):
    """F07."""
    for message in ranks(2)(copy_before_and_after, stage):
        assert "copy it before `prepare`" in message


def gone_model() -> tuple[int, int]:
    import gc

    from ourshard.runtime.engine import ENGINES

    gc.collect()
    before = len(ENGINES)
    both = pair({"stage": 3}, toy, adamw)
    both.train(2)
    during = len(ENGINES) - before
    del both
    gc.collect()
    return during, len(ENGINES) - before


def test_a_model_that_is_let_go_leaves_no_engine(ranks):
    assert ranks(2)(gone_model) == [(1, 0)] * 2
