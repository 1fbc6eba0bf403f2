"""Units that are stepped in the backward that makes their gradients: Note [Steps in backward] in in_backward.py."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ourshard.config import ShardConfig
from torch import nn

from tests.ranks.nets import Toy, square_loss
from tests.ranks.pairs import joined, part
from tests.ranks.test_optimizers import make_optimizer

PLAIN = {"stage": 3, "persist_below": 20, "ledger": True}
EARLY = {**PLAIN, "optimizer_in_backward": True}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "stage 3": ({}, "AdamW"),
    "stage 3, deferred, foreach": ({"accumulate": "deferred", "persist_below": 0}, "AdamW foreach"),
    "stage 2": ({"stage": 2}, "SGD nesterov"),
    "stage 1": ({"stage": 1, "precision": {"param_dtype": "bfloat16"}}, "AdamW"),
    "masters over replicas": ({"shard_size": 1, "shard_optimizer_over": "all"}, "RMSprop"),
    "recomputed": ({"activation_checkpointing": True}, "Adagrad"),
}


class Choosing(Toy):
    """A toy that may leave its last blocks out."""

    used = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[: self.used]:
            x = block(x)
        return self.last(x)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Divide the parameters, those of each block too, into two groups with values of their own."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0.2}]


def made(config: dict[str, Any], kind: str = "AdamW") -> tuple[Any, Any, torch.optim.Optimizer]:
    from ourshard import adopt_optimizer, engine_of, shard_model

    model = shard_model(Choosing(), config)
    return model, engine_of(model), adopt_optimizer(make_optimizer(kind, groups_of(model)))


def trained(config: dict[str, Any], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[int], int]:
    """Train with groups, a scheduler, accumulation, two losses, and a block that one rank, then none uses.

    Return weights and norms, the optimizer's state dict, how many lanes were stepped, and the most bytes of gradients.
    """
    from ourshard import clip_grad_norm_, full_state_dict

    model, engine, optimizer = made(config, kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepped, most, norms = [], [], []
    for step in range(4):
        model.used = 3 if step < 2 else 2 + engine.mesh.world.rank * (step == 2)
        losses: list[torch.Tensor] = []  # of the last step, of which both sync
        for micro in range(1 + step % 2):
            engine.require_sync = micro == step % 2 or step == 3
            loss = square_loss(model, part(joined(2 * step + micro)))
            losses.append(loss) if step == 3 else loss.backward()
        for loss in losses:
            loss.backward()
        stepped.append(sum(lane.spent for lane in engine.lanes()))
        norms.append(clip_grad_norm_(model, math.inf))
        optimizer.step()
        scheduler.step()
        most.append(engine.ledger.peak["gradient"])
        (model if step % 2 else optimizer).zero_grad()
    weights = {**full_state_dict(model), "norms": torch.stack(norms)}
    return weights, optimizer.state_dict(), stepped, most[0]


def both_ways(options: dict[str, Any], kind: str) -> tuple[list[int], int, int]:
    weights, optimizer, none, before = trained({**PLAIN, **options}, kind)
    early, its_optimizer, stepped, most = trained({**EARLY, **options}, kind)
    assert not any(none)
    assert list(weights) == list(early)
    assert all(torch.equal(value, early[name]) for name, value in weights.items())
    assert its_optimizer["param_groups"] == optimizer["param_groups"]
    assert its_optimizer["state"].keys() == optimizer["state"].keys()
    for number, state in optimizer["state"].items():
        assert state.keys() == its_optimizer["state"][number].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(its_optimizer["state"][number][name])), name
    return stepped, before, most


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_weights_and_state_have_the_bits_of_a_step_after_backward(name: str, ranks: Callable[..., Any]) -> None:
    told = ranks(2)(both_ways, *CASES[name])
    assert all(0 not in stepped for stepped, _, _ in told)
    if name == "stage 3":
        assert [stepped for stepped, _, _ in told] == [[3, 3, 2, 2], [3, 3, 3, 2]]


WIDE: dict[str, tuple[dict[str, Any], str]] = {
    "hybrid": ({"shard_size": 2}, "AdamW"),
    "masters over two replicas": ({"shard_size": 2, "shard_optimizer_over": "all"}, "SGD nesterov"),
    "second shard": ({"secondary_shard_size": 2}, "Rprop"),
    "int8": (
        {"communication": {"gradients": "int8", "error_feedback": True, "block": 16}, "persist_below": 0},
        "AdamW",
    ),
    "kept whole for backward": ({"reshard_after_forward": False}, "Adamax"),
    "16 bits": ({"stage": 2, "precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}, "NAdam"),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_they_have_on_four_ranks_too(name: str, ranks: Callable[..., Any]) -> None:
    assert all(0 not in stepped for stepped, _, _ in ranks(4)(both_ways, *WIDE[name], timeout=120))


def held() -> tuple[int, int, list[int]]:
    """Return the most bytes of gradients with and without the option, and when each unit was just reduced."""
    (_, _, _, early), (_, _, _, plain) = trained(EARLY, "AdamW"), trained(PLAIN, "AdamW")
    _, engine, _ = made(PLAIN)
    whole, at_each = 0, []
    for unit in (*reversed(engine.units[:-1]), engine.root):
        whole += sum(lane.master.nbytes for lane in unit.lanes if lane.placement.whole)
        at_each.append(whole + sum(lane.master.nbytes for lane in unit.lanes if not lane.placement.whole))
    return early, plain, at_each


@pytest.mark.ranks
def test_one_unit_at_a_time_has_gradients(ranks: Callable[..., Any]) -> None:
    for early, plain, at_each in ranks(2)(held):
        assert early == max(at_each)
        assert plain > 2 * early


def backward(model: nn.Module, number: int = 0) -> None:
    square_loss(model, part(joined(number))).backward()


def misused(how: str) -> str:
    """Return what a use is told that would see half of a step."""
    from ourshard import ShardGradScaler, clip_grad_norm_, clip_grad_value_, full_state_dict, gathered

    model, engine, optimizer = made(EARLY)
    group = optimizer.param_groups[0]
    if how == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    try:
        loss = square_loss(model, part(joined(0)))
        if how == "losses":
            model.used = 2
            other = square_loss(model, part(joined(1)))
        loss.backward()
        if how == "losses":
            other.backward()
        elif how == "forward":
            with torch.no_grad():
                square_loss(model, part(joined(1)))
        elif how == "zero_grad":
            optimizer.zero_grad()
        elif how == "kept":
            optimizer.step()
            backward(model, 1)
        elif how == "lr":
            group["lr"] = 0.5
            optimizer.step()
        elif how == "closure":
            optimizer.step(lambda: 0.0)
        elif how == "given":
            group["params"][2].grad = torch.zeros_like(group["params"][2])
            optimizer.step()
        elif how == "scaler":
            scaler = ShardGradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        elif how == "norm":
            clip_grad_norm_(model, 1.0)
        elif how == "other norm":
            clip_grad_norm_(model, math.inf, norm_type=1.0)
        elif how == "part":
            clip_grad_norm_(model.blocks[0].up.weight, math.inf)
        elif how == "value":
            clip_grad_value_(model.parameters(), 1.0)
        elif how == "look":
            assert model.blocks[0].up.weight.grad is not None
            model.blocks[0].up.weight.grad.local  # noqa: B018
        elif how == "zeros":
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        elif how == "save":
            full_state_dict(model)
        elif how == "gathered":
            with gathered(model):
                pass
        elif how == "late":
            engine.units[0].reduce()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


TOLD = {
    "losses": "another backward comes before its step() was called",
    "forward": "this forward comes before its step() was called",
    "zero_grad": "its gradients are dropped (zero_grad) before",
    "kept": "Call zero_grad() after each step",
    "lr": "'lr' of group 0 of the AdamW was 0.001 while backward stepped units, and is 0.5 in step()",
    "closure": "AdamW.step(closure)",
    "given": "a gradient was given to 'blocks.0",
    "hook": "a hook is registered to run before the step of the AdamW",
    "norm": "set optimizer_in_backward: false",
    "other norm": "Gradients can't be clipped",
    "part": "Ask for the norm of the whole model",
    "value": "max_grad_norm=0",
    "scaler": "with loss scaling (fp16)",
    "look": "The gradient of 'blocks.0.up.weight' is gone",
    "zeros": "(zero_grad(set_to_none=False))",
    "save": "weights are read or saved before its step() was called",
    "gathered": "weights are read or saved before its step() was called",
    "late": "blocks.0: a gradient came after the unit was stepped",
}


def misused_each() -> dict[str, str]:
    return {how: misused(how) for how in TOLD}


@pytest.mark.ranks
def test_what_would_see_half_of_a_step_is_refused(ranks: Callable[..., Any]) -> None:
    for told in ranks(2)(misused_each):
        assert {how: text for how, text in told.items() if TOLD[how] not in text} == {}


def torn() -> list[str]:
    """Fail in a backward that has stepped a block; return what the next forward is told, before and after a load."""
    from ourshard import full_state_dict, load_full_state_dict

    model, _, optimizer = made(EARLY)
    before, told = full_state_dict(model), []

    def fail(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    failing = model.blocks[0].norm.weight.register_hook(fail)
    try:
        backward(model)
    except KeyboardInterrupt:
        told.append("failed")
    failing.remove()
    for load in (False, True):
        if load:
            load_full_state_dict(model, before)
        try:
            backward(model)
            optimizer.step()
            told.append("stepped")
        except RuntimeError as error:
            told.append(str(error))
    return told


@pytest.mark.ranks
def test_after_a_backward_that_failed_weights_are_loaded_first(ranks: Callable[..., Any]) -> None:
    for first, second, third in ranks(2)(torn):
        assert (first, third) == ("failed", "stepped")
        assert "Load a checkpoint" in second


def two_optimizers() -> tuple[str, list[int], list[str]]:
    """Step one of two optimizers alone; then train with one that nobody has told of; return what is said."""
    from ourshard import adopt_optimizer, engine_of, shard_model

    model = shard_model(Choosing(), EARLY)
    halves = model.blocks[0].parameters(), [*model.blocks[1:].parameters(), *model.last.parameters()]
    first, _ = (adopt_optimizer(torch.optim.AdamW(half)) for half in halves)
    backward(model)
    first.step()
    try:
        backward(model)
        told = "nothing"
    except RuntimeError as error:
        told = str(error)
    model, said = shard_model(Choosing(), EARLY), []
    engine = engine_of(model)
    assert engine is not None
    optimizer, stepped = torch.optim.AdamW(model.parameters()), []
    listening = logging.Handler()
    listening.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ourshard").addHandler(listening)
    for _ in range(2):
        backward(model)
        stepped.append(sum(lane.spent for lane in engine.lanes()))
        optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("ourshard").removeHandler(listening)
    return told, stepped, said


@pytest.mark.ranks
def test_each_optimizer_is_to_step_and_one_that_is_not_known_is_waited_for(ranks: Callable[..., Any]) -> None:
    for told, stepped, said in ranks(2)(two_optimizers):
        assert "the AdamW has stepped 2 lanes" in told
        assert stepped == [0, 3]
        assert [text for text in said if "this backward kept all gradients" in text] == said != []


def refused() -> list[str]:
    from ourshard import adopt_optimizer, shard_model
    from torch.distributed.optim import _apply_optimizer_in_backward

    told = []
    stepping = Choosing()
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    try:
        shard_model(stepping, PLAIN)
    except ValueError as error:
        told.append(str(error))
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        try:
            adopt_optimizer(kind(shard_model(Choosing(), EARLY).parameters()))
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.ranks
def test_optimizers_that_need_all_gradients_or_step_by_themselves_are_refused(ranks: Callable[..., Any]) -> None:
    torchs, adafactor, lbfgs = ranks(2)(refused)[0]
    assert "_apply_optimizer_in_backward" in torchs
    assert "optimizer_in_backward: torch.optim.Adafactor steps whole parameters" in adafactor
    assert "LBFGS" in lbfgs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stage": 0}, "needs stage 1, 2 or 3"),
        ({"offload": {"optimizer": "cpu"}}, "can't be combined with offload.optimizer: cpu"),
        ({"cuda_graph": True}, "can't be combined with optimizer_in_backward"),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_the_config(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardConfig.from_dict({"optimizer_in_backward": True, **values})
