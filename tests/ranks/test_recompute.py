"""`activation_checkpointing: true` recomputes the units in backward and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ourshard.runtime.api import engine_of, full_state_dict, shard_model
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


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


class Judged(nn.Module):
    """A Transformers model inside of another module, called as users do: it makes a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.trunk = LlamaModel(LlamaConfig(vocab_size=40, attn_implementation="eager", **sizes))
        self.head = nn.Linear(24, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.head(self.trunk(ids).last_hidden_state).mean()
        return value


def norm_of(options: dict[str, Any]) -> float:
    from ourshard import clip_grad_norm_

    model = shard_model(Judged(), {"stage": 3, "persist_below": 0, **options})
    model(torch.arange(12).view(2, 6)).backward()
    return clip_grad_norm_(model, 1e9).item()


@pytest.mark.ranks
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_transformers_model_inside_of_another_module_makes_no_cache_to_fill_twice(ranks, offload) -> None:
    again = {"activation_checkpointing": True, "offload": {"activations": offload}}
    assert ranks(2)(norm_of, again) == pytest.approx(ranks(2)(norm_of, {}))


class Cached(nn.Linear):
    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


def test_a_unit_that_is_given_a_cache_is_refused_in_training() -> None:
    from transformers import DynamicCache

    model = shard_model(
        nn.Sequential(Cached(2, 2)), {"wrap": {"classes": ["Cached"]}, "activation_checkpointing": True}
    )
    with torch.no_grad():
        model[0](torch.ones(2), DynamicCache())
    with pytest.raises(ValueError, match=r"Cached is given a DynamicCache in training.*use_cache=False"):
        model[0](torch.ones(2), DynamicCache())


class Measuring(Block):
    """A block with the statistics of a batch norm, a buffer that it writes to, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(self.norm(x))


def statistics(checkpointing: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = shard_model(
        nn.Sequential(Measuring(), Measuring()), {"stage": 3, "activation_checkpointing": checkpointing}
    )
    for _ in range(2):  # a replaced buffer is followed
        model(torch.randn(4, 12, generator=torch.Generator().manual_seed(7))).pow(2).mean().backward()
    return dict(model.named_buffers())


@pytest.mark.ranks
def test_buffers_that_units_update_count_each_batch_once(ranks) -> None:
    for plain, again in zip(ranks(2)(statistics, False), ranks(2)(statistics, True), strict=True):
        torch.testing.assert_close(again, plain)


class Normed(Block):
    """A block with a spectral norm, and a codebook that it reads and moves."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.up)
        self.register_buffer("book", torch.linspace(-1, 1, 5 * 12).view(5, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.book).argmin(1)
        near = self.book[nearest]
        with torch.no_grad():
            self.book.index_add_(0, nearest, 0.3 * (x - near))
        return super().forward(x + 0.5 * near)


def trained(checkpointing: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    options = {"stage": 3, "persist_below": 0, "activation_checkpointing": checkpointing}
    model = shard_model(nn.Sequential(Normed(), Normed()), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        optimizer.step()
    return full_state_dict(model)


@pytest.mark.ranks
def test_units_run_again_with_the_buffers_that_they_ran_with(ranks) -> None:
    """F12: with those that the first run had left, gradients were of other weights than the loss."""
    for plain, again in zip(ranks(2)(trained, False), ranks(2)(trained, True), strict=True):
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=0)
