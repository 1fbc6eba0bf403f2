"""F02: several forwards before a backward, several backwards, modules that are used again, orders that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import Block, numbers, square_loss
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, momentum

pytestmark = pytest.mark.ranks

CONFIGS_BY_NAME = {**TOY, "whole": {"stage": 3, "persist_below": 0, "reshard_after_forward": False}}
CONFIGS = pytest.mark.parametrize("config", CONFIGS_BY_NAME.values(), ids=CONFIGS_BY_NAME.keys())


def nothing_is_left(engine: Any) -> None:
    """No whole parameters outlive the step, and nothing counts as open."""
    held = engine.ledger.held
    assert held["slot"] == 0, f"{held['slot']} bytes of gathered parameters are left"
    assert held["reduce"] == 0, f"{held['reduce']} bytes of unreduced gradients are left"
    assert not any(unit.calls.open or unit.running or unit.held for unit in engine.units)


def with_ledger(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "ledger": True}


def one_backward_of_two_forwards(config: dict[str, Any]) -> None:
    both = pair(with_ledger(config))
    for step in range(3):
        both.zero_grad()
        a, b = joined(2 * step), joined(2 * step + 1)
        (both.plain(a).square().mean() + both.plain(b).abs().mean()).backward()
        (both.sharded(part(a)).square().mean() + both.sharded(part(b)).abs().mean()).backward()
        both.assert_same_gradients()
        both.step()
        nothing_is_left(both.engine)
    both.assert_same()


def two_backwards_of_two_forwards(config: dict[str, Any]) -> None:
    both = pair(with_ledger(config))
    for step in range(3):
        both.zero_grad()
        a, b = joined(2 * step), joined(2 * step + 1)
        losses = [both.plain(a).square().mean(), both.plain(b).abs().mean()]
        mine = [both.sharded(part(a)).square().mean(), both.sharded(part(b)).abs().mean()]
        for loss in (*losses, *mine):
            loss.backward()
        both.assert_same_gradients()
        both.step()
        nothing_is_left(both.engine)
    both.assert_same()


def two_backwards_of_one_forward(config: dict[str, Any]) -> None:
    both = pair(with_ledger(config))
    for step in range(3):
        both.zero_grad()
        for model, rows in ((both.plain, joined(step)), (both.sharded, part(joined(step)))):
            out = model(rows)
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()
        both.assert_same_gradients()
        both.step()
        nothing_is_left(both.engine)
    both.assert_same()


def a_forward_without_gradients_between(config: dict[str, Any]) -> None:
    both = pair(with_ledger(config))
    for step in range(3):
        both.zero_grad()
        losses = [square_loss(both.plain, joined(step)), square_loss(both.sharded, part(joined(step)))]
        with torch.no_grad():
            torch.testing.assert_close(both.sharded(joined(9)), both.plain(joined(9)))
        for loss in losses:
            loss.backward()
        both.step()
        nothing_is_left(both.engine)
    both.assert_same()


@CONFIGS
def test_one_backward_of_two_forwards(ranks, config):
    ranks(2)(one_backward_of_two_forwards, config)


@CONFIGS
def test_two_backwards_of_two_forwards(ranks, config):
    ranks(2)(two_backwards_of_two_forwards, config)


@CONFIGS
def test_two_backwards_of_one_forward(ranks, config):
    ranks(2)(two_backwards_of_one_forward, config)


@CONFIGS
def test_a_forward_without_gradients_between_forward_and_backward(ranks, config):
    ranks(2)(a_forward_without_gradients_between, config)


class Looped(nn.Module):
    """Calls one block three times, another once in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again, self.once = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.once(self.again(self.again(x))))


class Turning(nn.Module):
    """Runs its blocks in an order that the caller sets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def a_looped_block(config: dict[str, Any]) -> None:
    both = pair({**with_ledger(config), "wrap": {"classes": ["Block"]}}, Looped, momentum)
    both.train(4)
    both.assert_same()
    nothing_is_left(both.engine)


def an_order_that_changes(config: dict[str, Any]) -> None:
    both = pair(with_ledger(config), Turning, momentum)
    for step, order in enumerate([[0, 1, 2, 3]] * 3 + [[2, 0, 3, 1]] * 3 + [[0, 1, 2, 3], [3, 3, 1], [0, 1, 2, 3]]):
        both.plain.order = both.sharded.order = order
        both.train(1, first=step)
        both.assert_same()
        nothing_is_left(both.engine)


@CONFIGS
def test_a_module_called_three_times_in_a_forward(ranks, config):
    ranks(2)(a_looped_block, config)


@CONFIGS
def test_an_order_of_modules_that_changes_in_step_3_and_back(ranks, config):
    ranks(2)(an_order_that_changes, config)


class ReadsTwice(nn.Module):
    """A weight of a block is read before the block runs, and again after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[1].up.weight
        before = weight.square().mean()
        x = self.blocks[1](self.blocks[0](x)) * before
        return x + self.blocks[1].up.weight.square().mean()


def reads_in_each_of_two_forwards(config: dict[str, Any]) -> None:
    both = pair(with_ledger({**config, "wrap": {"classes": ["Block"]}}), ReadsTwice)
    for step in range(3):
        both.zero_grad()
        for model, cut in ((both.plain, joined), (both.sharded, lambda number: part(joined(number)))):
            first, second = (square_loss(model, cut(2 * step + number)) for number in range(2))
            first.backward(retain_graph=True)
            second.backward()
            first.backward()
        both.step()
    both.assert_same()
    nothing_is_left(both.engine)


@CONFIGS
def test_backwards_one_after_another_find_the_weights_that_their_forwards_have_read(ranks, config):
    ranks(2)(reads_in_each_of_two_forwards, config)


class Chooses(nn.Module):
    """One of two blocks runs, by rank; in evaluation both do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.blocks[1](self.blocks[0](x))
        return self.blocks[dist.get_rank()](x)


def evaluated_before_backward() -> None:
    from ourshard import engine_of, shard_model

    model = shard_model(Chooses(), with_ledger({**CONFIGS_BY_NAME["whole"], "wrap": {"classes": ["Block"]}}))
    for step in range(4):
        loss = square_loss(model, numbers(step, 2))
        if step % 2:
            with torch.no_grad():
                model(numbers(step, 2))
        loss.backward()
    nothing_is_left(engine_of(model))


def test_evaluation_leaves_whole_what_a_backward_of_this_rank_alone_will_read(ranks):
    ranks(2)(evaluated_before_backward)


def many_forwards(config: dict[str, Any]) -> dict[str, int]:
    both = pair(with_ledger(config))
    both.train(2)
    peaks = {}
    for count in (2, 6):
        both.engine.ledger.reset()
        for number in range(count):
            with torch.no_grad():
                both.sharded(part(joined(number)))
        peaks[str(count)] = both.engine.ledger.peak["slot"]
    nothing_is_left(both.engine)
    return peaks


def test_forwards_without_gradients_do_not_pile_up_memory(ranks):
    for peaks in ranks(2)(many_forwards, {"stage": 3, "persist_below": 0}):
        assert peaks["2"] == peaks["6"] > 0
