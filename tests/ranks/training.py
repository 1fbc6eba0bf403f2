"""Train on ranks and in one process, alike, and compare.

A `Task` says what to train on what. `reference(task)` is plain torch in this process on the joined batch; `train(task,
config)` runs on a rank, on its part of the batch. Both give a `Result`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import llama, numbers, square_loss, token_loss, tokens, toy

Configs = dict[str, dict[str, Any]]

STAGES: Configs = {f"stage {stage}": {"stage": stage} for stage in range(4)}
VARIANTS: Configs = {
    "whole until backward": {"stage": 3, "reshard_after_forward": False},
    "last whole until backward": {"stage": 3, "keep_last": 12_000},  # one layer of Llama
    "deferred": {"stage": 3, "accumulate": "deferred"},
    "deferred at stage 2": {"stage": 2, "accumulate": "deferred"},
    "nothing persists": {"stage": 3, "persist_below": 0},
    "some persist": {"stage": 3, "persist_below": 100},
    "no prefetch": {"stage": 3, "prefetch": {"forward": 0, "backward": 0}},
    "deep prefetch": {"stage": 3, "prefetch": {"forward": 3, "backward": 2}},
    "one unit": {"stage": 3, "wrap": {"policy": "none"}},
}

# All parameters of the toy are below the default of `persist_below`: without a threshold of their own, these would all
# be stage 0.
TOY: Configs = {f"stage {stage}": {"stage": stage, "persist_below": 0} for stage in range(4)}
TOY["some persist"] = {"stage": 3, "persist_below": 100}


def with_each(configs: Configs, prefix: str, **changes: Any) -> Configs:
    """Return every config with some values changed; names get `prefix`."""
    return {f"{prefix} {name}": {**config, **changes} for name, config in configs.items()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW whose `eps` is far above the rounding of gradients.

    With the usual 1e-8, an element whose true gradient is zero (an embedding row that no batch uses, a query at a
    saturated softmax) gets a full step of size `lr` in the direction of its rounding noise, about 1e-9, and two exact
    implementations part by 2 lr. With 1e-4 such noise moves a weight by lr * 1e-9 / 1e-4.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.1, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Task:
    """What is trained on what. `rows` is the batch of one rank; functions are module-level, since ranks get them."""

    make: Callable[[], nn.Module] = toy
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = square_loss
    batch: Callable[[int, int], torch.Tensor] = numbers
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    steps: int = 5
    accumulate: int = 1
    rows: int = 2
    clip: float | None = None


def llama_task(**options: Any) -> Task:
    return Task(make=llama, loss=token_loss, batch=tokens, **options)


@dataclass
class Result:
    """Losses by step (mean over ranks), norms before clipping, and the final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute as a rank does, so that sums have the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a module that computes `model` in `dtype` while gradients reach the parameters as they are."""
    return model if dtype is None else _Cast(model, dtype)


class _Cast(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        args = tuple(a.to(self.dtype) if a.is_floating_point() else a for a in args)
        return torch.func.functional_call(self.model, cast, args, kwargs)


def reference(task: Task, world: int, *, compute: torch.dtype | None = None, one_by_one: bool = False) -> Result:
    """Train in plain torch on the joined batch.

    With `one_by_one` the parts of the ranks go through one after the other, so that the order of additions is that of
    the ranks; `compute` is the dtype of forward and backward, with masters as they are.
    """
    with one_thread():
        model, result = task.make(), Result()
        optimizer = task.optimizer(model.parameters())
        computing = in_dtype(model, compute)
        for step in range(task.steps):
            optimizer.zero_grad()
            total = 0.0
            for micro in range(task.accumulate):
                batch = task.batch(step * task.accumulate + micro, task.rows * world)
                for part in batch.chunk(world) if one_by_one else [batch]:
                    loss = task.loss(computing, part) / (world if one_by_one else 1) / task.accumulate
                    loss.backward()
                    total += loss.item()
            if task.clip is not None:
                result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
            optimizer.step()
            result.losses.append(total)
        result.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


def train(task: Task, config: dict[str, Any]) -> Result:
    """Train on this rank's part of each batch; runs on every rank."""
    from ourshard import clip_grad_norm_, engine_of, full_state_dict, shard_model

    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard_model(task.make(), config)
    engine = engine_of(model)
    assert engine is not None
    optimizer, result = task.optimizer(model.parameters()), Result()
    for step in range(task.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(task.accumulate):
            batch = task.batch(step * task.accumulate + micro, task.rows * world).chunk(world)[rank]
            last = micro == task.accumulate - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                loss = task.loss(model, batch) / task.accumulate
                loss.backward()
            total += loss.detach()
        if task.clip is not None:
            result.norms.append(clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
        dist.all_reduce(total)
        result.losses.append(total.item() / world)
    result.state = full_state_dict(model)
    return result


def train_all(task: Task, configs: Configs) -> dict[str, Result]:
    """Train once for each config, in one call of the pool."""
    return {name: train(task, config) for name, config in configs.items()}


def difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any element; the names and shapes must be the same, in the same order."""
    assert list(got) == list(wanted)
    assert [v.shape for v in got.values()] == [v.shape for v in wanted.values()]
    apart = ((_exact(got[k]) - _exact(wanted[k])).abs().max().item() for k in got if got[k].numel())
    return max(apart, default=0.0)


def _exact(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def assert_same(results: list[Result], expected: Result, tolerance: float = 1e-6, what: str = "") -> None:
    """Check weights and losses of every rank against one process; `tolerance` 0 means the same bits."""
    for rank, result in enumerate(results):
        apart = difference(result.state, expected.state)
        assert apart <= tolerance, f"{what}: weights of rank {rank} differ by {apart:.3g}, more than {tolerance:.3g}"
        # Losses and norms are of order 1 to 10, and a mean over ranks is summed in another order.
        near = {"abs": max(10 * tolerance, 1e-6), "rel": 1e-6}
        assert result.norms == pytest.approx(expected.norms, **near), f"{what}: norms of rank {rank}"
        assert result.losses == pytest.approx(expected.losses, **near), f"{what}: losses of rank {rank}"


def assert_same_bits(found: Result, wanted: Result, what: str = "") -> None:
    """Compare losses, norms and weights of two sharded runs."""
    assert found.losses == wanted.losses, what
    assert found.norms == wanted.norms, what
    assert list(found.state) == list(wanted.state), what
    for key, value in wanted.state.items():
        assert torch.equal(value, found.state[key]), f"{what}: {key}"


def compare(on_ranks: Any, task: Task, configs: Configs, expected: Result, tolerance: float = 1e-6) -> None:
    """Train `task` under each config on ranks, `ranks(world)`, and check each against `expected`."""
    results = on_ranks(train_all, task, configs)
    for name in configs:
        assert_same([result[name] for result in results], expected, tolerance, f"{name} on {len(results)} ranks")
