"""Graphs from before a step: what they saved of parameters is gone, and their backward raises as torch's own does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, Configs, sgd

pytestmark = pytest.mark.ranks

STEPPED = "modified by an inplace operation"
ON_HOST: Configs = {
    "optimizer on the host": {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu"}},
    "steps overlap": {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu", "overlap_step": True}},
    "steps in backward": {"stage": 3, "persist_below": 0, "optimizer_in_backward": True},
    "hybrid": {"stage": 3, "persist_below": 0, "shard_size": 1},
}


def backward_after_a_step(config: dict[str, Any]) -> None:
    both = pair(config)
    both.train(1)
    late = square_loss(both.plain, joined(1)), square_loss(both.sharded, part(joined(1)))
    both.backward(joined(2))
    both.step()
    for loss in late:
        with pytest.raises(RuntimeError, match=STEPPED):
            loss.backward()
    both.engine.reset()
    both.train(2, first=3)
    both.assert_same()


def test_a_backward_after_a_step_raises_as_in_one_process_and_training_goes_on(ranks):
    for name, config in (TOY | ON_HOST).items():
        print(name)
        ranks(2)(backward_after_a_step, config)


def of_a_gathered_model(config: dict[str, Any]) -> None:
    import ourshard

    both = pair(config)
    both.backward(joined(0))
    with ourshard.gathered(both.sharded):
        penalty = sum(p.pow(2).sum() for p in both.sharded.parameters())
    both.step()
    with pytest.raises(RuntimeError, match=STEPPED):
        penalty.backward()  # type: ignore[union-attr]


def test_so_does_that_of_what_was_computed_inside_of_gathered(ranks):
    for config in TOY.values():
        ranks(2)(of_a_gathered_model, config)


def steps_of_others(config: dict[str, Any]) -> None:
    import ourshard

    plain, sharded = toy(), ourshard.shard_model(toy(), config)
    for model, rows in ((plain, joined), (sharded, lambda number: part(joined(number)))):
        first, rest = sgd(model.first.parameters()), sgd([*model.blocks.parameters(), *model.last.parameters()])
        for _ in range(2):
            square_loss(model, rows(0)).backward()
            late = square_loss(model, rows(1))  # no backward of the first layer reads its weight
            first.step()
            late.backward()
            rest.step()
            for optimizer in (first, rest):
                optimizer.zero_grad()
    state = ourshard.full_state_dict(sharded)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)


def test_a_step_of_parameters_that_a_graph_has_not_saved_leaves_it_as_it_is(ranks):
    for config in TOY.values():
        ranks(2)(steps_of_others, config)
