"""`torch.compile` around a step of the optimizer, as torch's guides have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, momentum

pytestmark = pytest.mark.ranks


def step_compiled(config: dict[str, Any]) -> None:
    both = pair(config, optimizer=momentum)

    @torch.compile(backend="eager")
    def step() -> None:
        both.optimizer.step()

    for number in range(3):
        both.zero_grad()
        rows = joined(number)
        F.mse_loss(both.plain(rows), rows).backward()
        F.mse_loss(both.sharded(part(rows)), part(rows)).backward()
        both.plain_optimizer.step()
        step()
    both.assert_same()


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_a_compiled_step_is_that_of_one_process(ranks, name: str):
    """F05: dynamo traced what runs around a step, and met parameters that have no storage."""
    ranks(2)(step_compiled, TOY[name])
