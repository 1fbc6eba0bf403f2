"""Parameters that users take from modules that show leaves: after a forward whose backward does not come, and gathered.

F11 and X09 of CASES.md: what is done to them is done to the model, as in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import WIDTH, Toy, square_loss
from tests.ranks.pairs import Pair, joined, pair, part
from tests.ranks.training import momentum

pytestmark = pytest.mark.ranks

CONFIGS: list[dict[str, Any]] = [
    {"stage": 3, "persist_below": 0},
    {"stage": 3, "persist_below": 0, "reshard_after_forward": False},
    {"stage": 2, "persist_below": 0},
]


def look(both: Pair) -> None:
    """Run a forward with gradients, for which no backward comes."""
    square_loss(both.plain, joined(9))
    square_loss(both.sharded, part(joined(9)))


def models(both: Pair) -> tuple[nn.Module, nn.Module]:
    return both.plain, both.sharded


def trains_by_an_optimizer_made_then(both: Pair) -> None:
    look(both)
    both.plain_optimizer, both.optimizer = (momentum(model.parameters()) for model in models(both))
    both.train(2)


def trains_what_joins_the_optimizer_then(both: Pair) -> None:
    both.plain_optimizer, both.optimizer = (momentum(model.blocks.parameters()) for model in models(both))
    both.train(1)
    look(both)
    for model, optimizer in zip(models(both), (both.plain_optimizer, both.optimizer), strict=True):
        optimizer.add_param_group({"params": [*model.first.parameters(), *model.last.parameters()], "lr": 0.01})
    both.train(2, first=1)


def trains_what_is_frozen_and_thawed_then(both: Pair) -> None:
    for step, frozen in ((0, True), (2, False)):
        look(both)
        for model in models(both):
            model.last.requires_grad_(not frozen)
        both.train(2, first=step)
        assert [p.requires_grad for p in both.sharded.parameters()] == [
            p.requires_grad for p in both.plain.parameters()
        ]


def trains_what_is_written_then(both: Pair) -> None:
    both.train(1)
    look(both)
    with torch.no_grad():
        for model in models(both):
            model.last.weight.mul_(0.5)
            model.first.bias[2:] = 0.25
    both.assert_same()
    look(both)
    state = {name: value.mul(0.5) for name, value in both.plain.state_dict().items()}
    for model in models(both):
        model.load_state_dict(state)
    both.train(1, first=1)


ZEROS: list[Callable[[nn.Module], Any]] = [
    lambda model: model.zero_grad(),
    lambda model: model.zero_grad(set_to_none=False),
    lambda model: [setattr(p, "grad", None) for p in model.parameters()],
]


def trains_by_gradients_zeroed_then(both: Pair) -> None:
    """Zero between forward and backward: what the last step left must not be added to."""
    for step, zero in enumerate(ZEROS):
        losses = [square_loss(both.plain, joined(step)), square_loss(both.sharded, part(joined(step)))]
        for model, loss in zip(models(both), losses, strict=True):
            zero(model)
            loss.backward()
        both.step()


def is_clipped_by_all_gradients(both: Pair) -> None:
    from ourshard import clip_grad_norm_

    for step in range(2):
        both.zero_grad()
        both.backward(joined(step))
        look(both)
        wanted = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.05)
        found = clip_grad_norm_(list(both.sharded.parameters()) if step else both.sharded, 0.05)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
        both.step()


@contextlib.contextmanager
def gathered(both: Pair) -> Iterator[None]:
    import ourshard

    with ourshard.gathered(both.sharded):
        yield


def trains_what_was_chosen_gathered(both: Pair) -> None:
    for model in models(both):
        model.first.requires_grad_(False)
    with gathered(both):
        assert not both.sharded.first.weight.requires_grad
        for model in models(both):
            model.blocks[1].requires_grad_(False)
        both.plain_optimizer, both.optimizer = (
            momentum([p for p in model.parameters() if p.requires_grad]) for model in models(both)
        )
    both.train(2)
    with gathered(both):
        for model in models(both):
            model.requires_grad_(True)
    both.train(1, first=2)


TRIES: list[Callable[[Pair], None]] = [
    trains_by_an_optimizer_made_then,
    trains_what_joins_the_optimizer_then,
    trains_what_is_frozen_and_thawed_then,
    trains_what_is_written_then,
    trains_by_gradients_zeroed_then,
    is_clipped_by_all_gradients,
    trains_what_was_chosen_gathered,
]


def try_each() -> None:
    for config in CONFIGS:
        for attempt in TRIES:
            both = pair(config, optimizer=momentum)
            attempt(both)
            both.assert_same()


def test_what_is_done_to_parameters_that_modules_show_is_done_to_the_model(ranks):
    ranks(2)(try_each)


class Peeking(Toy):
    """A toy that reads weights of a block before the block runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + nn.functional.linear(x, self.blocks[1].up.weight)[:, :WIDTH])


def try_each_after_a_look() -> None:
    for attempt in TRIES:
        both = pair(CONFIGS[0], Peeking, momentum)
        attempt(both)
        both.assert_same()


def test_so_is_what_is_done_to_those_of_a_unit_that_was_read_before_it_ran(ranks):
    ranks(2)(try_each_after_a_look)
