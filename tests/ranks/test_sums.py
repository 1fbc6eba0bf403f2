"""Gradients of ranks that are added, not averaged (C01): each loss is a sum, divided by what the whole batch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import Toy
from tests.ranks.pairs import joined, pair

pytestmark = pytest.mark.ranks

SUM = {"reduce_op": "sum"}


def sum_of_squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().pow(2).sum() / 32


def train(config: dict[str, Any], accumulate: int, tolerance: float) -> None:
    """Compare with one process, whose loss over the joined batch is the sum of those of the ranks."""
    both = pair({**config, "communication": {**SUM, **config.get("communication", {})}}, make=Toy)
    for step in range(2):
        for micro in range(accumulate):
            both.engine.require_sync = micro == accumulate - 1
            both.backward(joined(3 * step + micro), sum_of_squares)
        if not config.get("optimizer_in_backward"):
            both.assert_same_gradients(tolerance)
        both.step()
        both.zero_grad()
    both.assert_same(tolerance)


HYBRID = {"stage": 3, "shard_size": 2}
EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (2, {"stage": 0}),
    "stage 1": (3, {"stage": 1}),
    "stage 2": (2, {"stage": 2, "persist_below": 0}),
    "stage 3": (3, {"stage": 3, "persist_below": 0}),
    "whole gradients until the sync": (2, {"stage": 2, "accumulate": "deferred"}),
    "hybrid": (4, HYBRID),
    "hybrid, at stage 1": (4, {**HYBRID, "stage": 1}),
    "hybrid, masters over all": (4, {**HYBRID, "shard_optimizer_over": "all", "persist_below": 0}),
    "masters on the host": (2, {"stage": 3, "offload": {"optimizer": "cpu"}}),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("what", EXACT)
def test_losses_that_are_sums_train_as_in_one_process(ranks: Any, what: str, accumulate: int) -> None:
    world, config = EXACT[what]
    ranks(world)(train, config, accumulate, 2e-6)


def test_so_do_those_whose_units_are_stepped_in_the_backward(ranks: Any) -> None:
    ranks(2)(train, {"stage": 3, "optimizer_in_backward": True}, 1, 2e-6)


CODED: dict[str, tuple[int, dict[str, Any]]] = {
    "one hop": (2, {"stage": 3, "persist_below": 0, "communication": {"gradients": "int8"}}),
    "two hops": (4, {"stage": 3, "persist_below": 0, "communication": {"gradients": "int8", "node_size": 2}}),
    "replicas": (4, {**HYBRID, "persist_below": 0, "communication": {"gradients": "int8"}}),
    "16 bits": (2, {"stage": 3, "precision": {"param_dtype": "float16", "reduce_dtype": "float16"}}),
}


@pytest.mark.parametrize("what", CODED)
def test_so_do_sums_of_coded_and_of_narrow_gradients(ranks: Any, what: str) -> None:
    world, config = CODED[what]
    ranks(world)(train, config, 2, 0.02)
