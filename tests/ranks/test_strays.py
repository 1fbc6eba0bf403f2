"""Gradients by what the user holds, in whose place a leaf computes: asked for, or brought there by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks.nets import WIDTH, Toy, numbers, square_loss, toy
from tests.ranks.pairs import part
from tests.ranks.training import TOY, Task, compare, reference, sgd

pytestmark = pytest.mark.ranks


class _Linear(torch.autograd.Function):
    """A linear layer as a fused kernel has it: `apply` asks no torch function of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class Fused(Toy):
    """A toy whose forward gives weights of a block, which is a unit of its own, to such a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.blocks[0].up
        return super().forward(x) + _Linear.apply(x, up.weight, up.bias)[:, :WIDTH]


class Penalized(Toy):
    """A toy with a penalty on all of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.float().square().sum() for p in self.parameters())
        return super().forward(x) + 0.01 * penalty


def test_weights_of_another_unit_given_to_a_custom_function_have_their_gradients(ranks):
    task = Task(make=Fused, optimizer=sgd, steps=3, accumulate=2)
    compare(ranks(2), task, TOY, reference(task, 2))


def test_a_penalty_on_the_masters_of_whole_parameters_counts(ranks):
    """Stage 0 and small parameters with fp32 masters: what the user holds is a plain tensor beside the leaf."""
    task = Task(make=Penalized, optimizer=sgd, steps=3)
    mixed = {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    configs = {name: {**TOY[name], **mixed} for name in ("stage 0", "stage 3", "some persist")}
    compare(ranks(2), task, configs, reference(task, 2), tolerance=4e-3)


def adaptive_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return two losses added up after their gradients by the last block's weight were taken, as VQGAN does."""
    outputs, weight = model(rows), model.blocks[2].down.weight  # type: ignore[union-attr]
    first = F.mse_loss(outputs, rows)
    (alone,) = torch.autograd.grad(first, weight, retain_graph=True)
    assert alone.shape == weight.shape
    assert alone.abs().sum() > 0
    return first + 0.5 * outputs.abs().mean()


def test_gradients_by_a_resting_parameter_are_given_and_leave_no_trace(ranks):
    task = Task(loss=adaptive_loss, optimizer=sgd, steps=3)
    compare(ranks(2), task, TOY, reference(task, 2))


def train_a_part(config: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    import ourshard

    model = toy() if config is None else ourshard.shard_model(toy(), config)
    optimizer = sgd(model.parameters())
    for step in range(2):
        rows = numbers(step, 4)
        loss = square_loss(model, rows if config is None else part(rows))
        loss.backward(inputs=[model.first.weight, *model.blocks[1].parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if config is None else ourshard.full_state_dict(model)


def test_a_backward_to_given_parameters_reaches_them_alone(ranks):
    wanted = train_a_part(None)
    for name in ("stage 0", "stage 3"):
        for found in ranks(2)(train_a_part, TOY[name]):
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in wanted.items()), name
