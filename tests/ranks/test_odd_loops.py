"""Loops that do what few do: gradients of gradients, `torch.func`, forward-mode gradients, weights held in a range."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from tests.ranks.nets import numbers, square_loss, toy
from tests.ranks.training import TOY, Configs, Task, compare, reference, sgd

pytestmark = pytest.mark.ranks

HYBRID: Configs = {f"hybrid stage {stage}": {"stage": stage, "persist_below": 0, "shard_size": 2} for stage in (1, 3)}


def with_penalty(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a loss with a penalty on the gradient of the outputs by the inputs."""
    inputs = rows.clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.pow(2).sum(), inputs, create_graph=True)
    return F.mse_loss(outputs, rows) + 0.01 * slope.pow(2).sum(1).mean()


def test_a_penalty_on_gradients_trains_as_in_one_process(ranks):
    task = Task(loss=with_penalty, optimizer=sgd, steps=3)
    compare(ranks(2), task, TOY, reference(task, 2))
    task = Task(loss=with_penalty, optimizer=sgd, steps=3, accumulate=2, rows=1)
    compare(ranks(4), task, HYBRID, reference(task, 4))


def derivatives(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what `torch.func` makes of a gathered model, and forward-mode gradients of it as it rests."""
    import ourshard

    model = ourshard.shard_model(toy(), config)
    rows, along = numbers(0, 3), numbers(1, 3)
    found = {}
    if config["stage"] == 3:
        for transform in (torch.func.vmap(model), lambda x: torch.func.jvp(model, (x,), (along,))):
            with pytest.raises(RuntimeError, match=r"inside of `torch\.func` transforms.*ourshard\.gathered"):
                transform(rows)
    with ourshard.gathered(model):
        found["vmap"] = torch.func.vmap(model)(rows).detach()
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, given, (rows,)).pow(2).mean()

        found |= torch.func.grad(loss)(parameters)
    with forward_ad.dual_level():
        outputs = model(forward_ad.make_dual(rows, along))
        found["forward"] = forward_ad.unpack_dual(outputs).tangent.detach()
    square_loss(model, rows).backward()
    return found


@pytest.mark.parametrize("name", ["stage 0", "stage 3"])
def test_transforms_of_a_gathered_model_and_forward_mode_gradients_are_those_of_one_process(ranks, name):
    model, rows = toy(), numbers(0, 3)
    model(rows).pow(2).mean().backward()
    wanted = {key: value.grad for key, value in model.named_parameters()}
    wanted["vmap"] = model(rows).detach()
    wanted["forward"] = torch.func.jvp(model, (rows,), (numbers(1, 3),))[1].detach()
    for found in ranks(2)(derivatives, TOY[name]):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.allclose(found[key], value, atol=1e-6), key


def held_in_a_range(config: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Train with halved gradients and weights held in a range after each step, and biases set after the first."""
    import ourshard

    model = toy() if config is None else ourshard.shard_model(toy(), config)
    optimizer = sgd(model.parameters())
    for step in range(3):
        rows = numbers(step, 4)
        square_loss(model, rows if config is None else rows.chunk(2)[dist.get_rank()]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
            parameter.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        if step == 0:
            model.apply(lambda part: nn.init.constant_(part.bias, 0.05) if isinstance(part, nn.LayerNorm) else None)
    return model.state_dict() if config is None else ourshard.full_state_dict(model)


def test_gradients_and_weights_changed_by_numbers_are_those_of_one_process(ranks):
    wanted = held_in_a_range(None)
    for name in ("stage 0", "stage 2", "stage 3"):
        for found in ranks(2)(held_in_a_range, TOY[name]):
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in wanted.items()), name


class WithLoss(nn.Module):
    """A model that returns its loss in a dictionary, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = toy()

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.net(rows)
        return {"loss": F.mse_loss(outputs, rows), "outputs": outputs}


def trained_inside_of_gathered(config: dict[str, Any] | None, in_dict: bool) -> dict[str, torch.Tensor]:
    """Train with forwards inside of `gathered`, backwards there or after it, some of them accumulating."""
    import ourshard

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return model(rows)["loss"] if in_dict else square_loss(model, rows)

    model = WithLoss() if in_dict else toy()
    if config is not None:
        model = ourshard.shard_model(model, config)
    engine = ourshard.engine_of(model)
    optimizer = sgd(model.parameters())
    for step in range(4):
        rows = numbers(step, 4)
        rows = rows if config is None else rows.chunk(2)[dist.get_rank()]
        with engine.no_sync() if engine and step == 0 else nullcontext():
            with ourshard.gathered(model) if engine else nullcontext():
                loss = loss_of(rows)
                if step != 2:
                    loss.backward()
            if step == 2:
                loss.backward()
        loss_of(2 * rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if config is None else ourshard.full_state_dict(model)


@pytest.mark.parametrize("in_dict", [False, True])
def test_forwards_inside_of_gathered_train_as_outside(ranks, in_dict):
    wanted = trained_inside_of_gathered(None, in_dict)
    for name in TOY:
        for found in ranks(2)(trained_inside_of_gathered, TOY[name], in_dict):
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in wanted.items()), name


def by_parts(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a loss of modules that are called on their own, and of a weight that is used by itself."""
    penalty = F.linear(rows, model.blocks[2].norm.weight.diag()).pow(2).mean()
    return F.mse_loss(model.last(model.blocks[1](model.first(rows))), rows) + penalty


def of_a_weight(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.linear(rows, model.blocks[0].up.weight).pow(2).mean()


def backwards_after_gathered(config: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Train with losses made inside of `gathered` and their backwards after it; the first of two does not sync."""
    import ourshard

    model = toy() if config is None else ourshard.shard_model(toy(), config)
    engine = ourshard.engine_of(model)
    optimizer = sgd(model.parameters())
    for step, loss_of in enumerate((by_parts, square_loss, of_a_weight)):
        rows = numbers(step, 4)
        rows = rows if config is None else rows.chunk(2)[dist.get_rank()]
        with engine.no_sync() if engine else nullcontext():
            square_loss(model, rows).backward()
        with ourshard.gathered(model) if engine else nullcontext():
            loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if config is None else ourshard.full_state_dict(model)


def frozen_before_gathered(config: dict[str, Any]) -> bool:
    import ourshard

    model = ourshard.shard_model(toy(), config)
    rows = numbers(dist.get_rank(), 2)
    square_loss(model, rows).backward()
    model.zero_grad()
    model.blocks[0].requires_grad_(False)
    with ourshard.gathered(model):
        loss = square_loss(model, rows)
    loss.backward()
    return all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_what_was_frozen_before_gathered_is_frozen_in_it(ranks):
    for config in TOY.values():
        assert ranks(2)(frozen_before_gathered, config) == [True, True]


def test_losses_made_inside_of_gathered_by_whatever_way_have_a_backward_after_it(ranks):
    wanted = backwards_after_gathered(None)
    for name in TOY:
        for found in ranks(2)(backwards_after_gathered, TOY[name]):
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in wanted.items()), name


def scaled_by_hand(config: dict[str, Any], adopts: bool) -> tuple[str, list[float], bool]:
    """Scale losses with torch's scaler, then with ours; rank 0 overflows in the second of three steps.

    Return what torch's ended in, the scales, and whether the weights are finite.
    """
    import ourshard

    model = ourshard.shard_model(toy(), config)
    optimizer = sgd(model.parameters())
    if adopts:
        ourshard.adopt_optimizer(optimizer)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0)
    theirs.scale(square_loss(model, numbers(0, 2))).backward()
    with pytest.raises(RuntimeError) as caught:
        theirs.step(optimizer)
    optimizer.zero_grad()
    scaler, scales = ourshard.ShardGradScaler("cpu", init_scale=64.0), []
    for step in range(3):
        loss = square_loss(model, numbers(step, 4).chunk(2)[dist.get_rank()])
        scaler.scale(loss * (float("inf") if step == 1 and dist.get_rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    finite = all(bool(value.isfinite().all()) for value in ourshard.full_state_dict(model).values())
    return str(caught.value), scales, finite


@pytest.mark.parametrize("adopts", [False, True], ids=["", "adopted"])
def test_torchs_own_scaler_is_refused_with_the_one_to_take_and_that_agrees_on_overflow(ranks, adopts):
    for text, scales, finite in ranks(2)(scaled_by_hand, TOY["stage 2"], adopts):
        assert "Use `ourshard.ShardGradScaler`" in text
        assert (scales, finite) == ([64.0, 32.0, 32.0], True)


def early_exit(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a loss that leaves the blocks after the first, and the last layer, without a gradient."""
    return model.blocks[0](model.first(rows)).pow(2).mean()


def gradients_after_a_drop(config: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Drop gradients, then train inside of `gathered` what has fewer; first after a forward that has no backward.

    Return the weights, and who had a gradient.
    """
    import ourshard

    model = toy() if config is None else ourshard.shard_model(toy(), config)
    optimizer, seen = sgd(model.parameters()), []
    for loss_of in (square_loss, early_exit, early_exit):
        rows = numbers(len(seen), 4)
        rows = rows if config is None else rows.chunk(2)[dist.get_rank()]
        square_loss(model, rows)
        with ourshard.gathered(model) if config else nullcontext():
            loss_of(model, rows).backward()
        seen.append([name for name, parameter in model.named_parameters() if parameter.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return (model.state_dict() if config is None else ourshard.full_state_dict(model)), seen


def test_gradients_that_were_dropped_do_not_come_back_at_the_end_of_gathered(ranks):
    wanted, who = gradients_after_a_drop(None)
    leaves = {"stage": 3, "persist_below": 1000, "wrap": {"min_params": 5}}  # units of plain parameters alone
    for config in (*TOY.values(), leaves):
        for found, seen in ranks(2)(gradients_after_a_drop, config):
            assert seen == who, config
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in wanted.items()), config
