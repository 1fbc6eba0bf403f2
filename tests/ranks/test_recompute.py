"""`activation_checkpointing: true` recomputes the units in backward and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ourshard.runtime.api import engine_of, shard_model
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 30), nn.Linear(30, 12)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(checkpointing: bool) -> tuple[list[float], list[int], dict[str, int]]:
    torch.manual_seed(0)
    options = {"stage": 3, "persist_below": 0, "ledger": True, "activation_checkpointing": checkpointing}
    model = shard_model(Stack(), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    return losses, [block.runs for block in model.blocks], dict(engine.ledger.gathers)


@pytest.mark.ranks
def test_units_run_twice_a_step_and_losses_stay_the_same(ranks: Callable[..., Any]) -> None:
    for plain, again in zip(ranks(2)(train, False), ranks(2)(train, True), strict=True):
        assert again[0] == plain[0]
        assert plain[1] == [3, 3, 3]
        assert again[1] == [6, 6, 6]
        assert again[2] == plain[2] == {f"blocks.{index}": 6 for index in range(3)}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return found


def test_a_tensor_that_a_unit_is_given_twice_is_one_when_it_runs_again() -> None:
    """Attention of torch computes in another way where queries and keys are one."""
    model = nn.Sequential(nn.Linear(12, 12), Attends())
    options = {"activation_checkpointing": True, "offload": {"activations": "cpu"}}
    shard_model(model, {"stage": 3, "wrap": {"classes": ["MultiheadAttention"]}, **options})
    model(torch.randn(4, 3, 12)).sum().backward()
