"""Modules that are called on their own, past the model's forward: F08, F02."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import WIDTH, Block
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY

pytestmark = pytest.mark.ranks

EVERY = pytest.mark.parametrize("config", [*TOY.values(), {"stage": 3}], ids=[*TOY, "all persist"])


class Giver(nn.Module):
    """A module that returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self) -> torch.Tensor:
        return self.weight


class Reader(nn.Module):
    """A module without parameters of its own, that reads those of modules which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.never_called = nn.Linear(WIDTH, WIDTH)
        self.giver = Giver()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.listed[0] + self.listed[1]
        return nn.functional.linear(x, self.never_called.weight) + x @ self.giver()


class Parts(nn.Module):
    """A reader and a block, which are called one after the other, or each on its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = Reader()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.reader(x))


def readers_on_their_own(config: dict[str, Any]) -> None:
    """Call the reader alone, in the first step of all, after a whole forward, and where nothing syncs."""
    both = pair(config, Parts)
    both.backward(joined(0), lambda model, x: model.reader(x).square().mean())
    both.step()
    both.zero_grad()
    with both.engine.no_sync():
        both.backward(joined(1), lambda model, x: model(x).square().mean())
    both.backward(joined(2), lambda model, x: model.reader(x).square().mean())
    both.step()
    both.assert_same()


@EVERY
def test_a_module_called_on_its_own_may_read_parameters_of_modules_that_it_does_not_call(ranks, config):
    ranks(2)(readers_on_their_own, config)


def frozen_and_thawed(config: dict[str, Any], name: str) -> None:
    """Freeze a module and call it alone; thaw it, after a forward that has no backward, and call it alone."""
    both = pair(config, Parts)
    rows = joined(0).requires_grad_()
    for model, x in ((both.plain, rows), (both.sharded, part(rows))):
        model.get_submodule(name).requires_grad_(False)
        model.get_submodule(name)(x).square().mean().backward()
    assert all(p.grad is None for p in both.sharded.parameters())
    both.sharded(part(joined(1)))
    for model in (both.plain, both.sharded):
        model.get_submodule(name).requires_grad_(True)
    both.backward(joined(2), lambda model, x: model.get_submodule(name)(x).square().mean())
    both.step()
    both.assert_same()


@EVERY
@pytest.mark.parametrize("name", ["reader", "block"])
def test_a_module_called_on_its_own_is_frozen_or_trained_as_it_was_set_just_before(ranks, config, name):
    ranks(2)(frozen_and_thawed, config, name)
