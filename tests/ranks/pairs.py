"""A sharded model beside a plain one, on a rank: both do the same, then their weights or gradients are compared.

The plain model sees the joined batch, the sharded one this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import numbers, square_loss, toy
from tests.ranks.training import sgd

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def part(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a joined batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def joined(number: int, rows: int = 2) -> torch.Tensor:
    """Return batch `number` for all ranks, `rows` for each."""
    return numbers(number, rows * dist.get_world_size())


@dataclass
class Pair:
    """The plain and the sharded model with their optimizers."""

    plain: nn.Module
    sharded: nn.Module
    plain_optimizer: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer

    @property
    def engine(self) -> Any:
        from ourshard import engine_of

        engine = engine_of(self.sharded)
        assert engine is not None
        return engine

    def backward(self, batch: torch.Tensor, loss: Loss = square_loss, scale: float = 1.0) -> None:
        (loss(self.plain, batch) * scale).backward()
        (loss(self.sharded, part(batch)) * scale).backward()

    def step(self) -> None:
        self.plain_optimizer.step()
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.plain_optimizer.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none)

    def train(self, steps: int, loss: Loss = square_loss, first: int = 0) -> None:
        for number in range(first, first + steps):
            self.zero_grad()
            self.backward(joined(number), loss)
            self.step()

    def assert_same(self, tolerance: float = 1e-6) -> None:
        """Check that all weights are the same."""
        from ourshard import full_state_dict

        got, wanted = full_state_dict(self.sharded), self.plain.state_dict()
        assert list(got) == list(wanted), f"names differ: {list(got)} and {list(wanted)}"
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")

    def assert_same_gradients(self, tolerance: float = 1e-6) -> None:
        """Check this rank's rows of every gradient, and which parameters have none."""
        plain = dict(self.plain.named_parameters())
        for name, parameter in self.sharded.named_parameters():
            wanted = plain[name].grad
            assert (parameter.grad is None) == (wanted is None), f"{name}: {parameter.grad} where {wanted} is wanted"
            if wanted is not None:
                got, rows = gradient_rows(parameter, wanted)
                torch.testing.assert_close(got, rows, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def gradient_rows(parameter: Any, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a gradient, flat, and the same rows of the wanted one."""
    if not hasattr(parameter, "row_range"):
        return parameter.grad.reshape(-1).float(), wanted.reshape(-1).float()
    start, stop = parameter.row_range
    local = parameter.grad.local.reshape(-1)
    granule = local.numel() // (stop - start) if stop > start else 0
    return local.float(), wanted.reshape(-1)[start * granule : stop * granule].float()


def pair(
    config: dict[str, Any],
    make: Callable[[], nn.Module] = toy,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> Pair:
    """Make a model twice and shard one; the optimizers are made after."""
    from ourshard import shard_model

    plain, sharded = make(), shard_model(make(), config, **options)
    return Pair(plain, sharded, optimizer(plain.parameters()), optimizer(sharded.parameters()))
