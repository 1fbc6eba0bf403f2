"""Captured steps with real ranks: what they agree on, and what a replay computes and leaves on the host.

CUDA graphs need a GPU (tests/gpu/graphs.py). Here a tape stands for a graph: it notes the operations of a capture,
collectives included, and a replay does them again on the same memory. All else is as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.runtime import attach
from ourshard.runtime.api import clip_grad_norm_, engine_of, full_state_dict, shard_model
from ourshard.runtime.buffer import Slot
from ourshard.runtime.control import Control
from ourshard.runtime.graph_policy import WARMUP, Call
from ourshard.runtime.graphs import Captured, GraphedForward
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.integrations.tiny import FEATURES, tiny

STEPS, ODD, SKIPPED, EVALUATED = 11, 5, 7, 8  # rank 1 has another shape; no backward follows; an evaluation follows


class Tape(TorchDispatchMode):
    """Notes operations, and does them again."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in operator._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in operator._schema.name:
            writes = any(argument.alias_info is not None for argument in operator._schema.arguments)
            self._done.append((operator, args, kwargs or {}, None if writes else result))
        return result

    def replay(self) -> None:
        for operator, args, kwargs, before in self._done:
            result = operator(*args, **kwargs)
            if operator.namespace == "c10d":
                dist.Work.unbox(result[-1]).wait()
            elif before is not None:
                pairs = zip(_tensors(before), _tensors(result), strict=True)
                for old, new in pairs:
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _finish_apart(control: Control, work: dist.Work) -> None:
    """Wait for gloo off the tape: what it copies at the end it copies in a replay too."""
    with _disable_current_modes():
        work.wait()


class Taped(Captured):
    """A captured step whose graphs are tapes."""

    def __init__(self, engine: Any, inputs: Call) -> None:
        self._engine = engine
        self._forward, self._backward = Tape(), Tape()  # type: ignore[assignment]
        self._leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs.leaves]
        self._spec = inputs.spec
        self._ticket = lambda: None  # type: ignore[assignment]
        self.anchor = torch.zeros(1, requires_grad=True)
        self.differentiable = set()

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        with graph:
            yield


class TapedForward(GraphedForward):
    """A forward whose captures are tapes; on `failing` ranks they fail. In the place of `RootHooks`."""

    failing: tuple[int, ...] = ()

    def __init__(self, engine: Any) -> None:
        self._made_for = engine

    def attach(self, *model: Any) -> None:
        if model:
            super().__init__(self._made_for, model[0])
        super().attach()

    def _recorded(self, inputs: Call) -> Captured:
        captured = Taped(self._engine, inputs)
        captured.record(self._eager, sorted(self._graded[inputs.key]))
        if self._engine.mesh.world.rank in self.failing:
            raise RuntimeError("the model reads a value")
        return captured


@contextmanager
def taping() -> Iterator[None]:
    """Let models be sharded with taped forwards, and slots keep their memory, as that of a graph does."""
    root, allocate, free, finish = attach.RootHooks, Slot.allocate, Slot.free, Control.finish
    attach.RootHooks = TapedForward  # type: ignore[misc,assignment]
    Slot.allocate = lambda self: setattr(self, "allocated", True)  # type: ignore[method-assign]
    Slot.free = lambda self: setattr(self, "allocated", False)  # type: ignore[method-assign]
    Control.finish = _finish_apart  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Control.finish = finish  # type: ignore[method-assign]
        attach.RootHooks = root  # type: ignore[misc]
        Slot.allocate, Slot.free = allocate, free  # type: ignore[method-assign]


def train(config: dict[str, Any], taped: bool, failing: tuple[int, ...] = ()) -> Any:
    """Return losses, whole weights, replays, and what the ledger counted."""
    TapedForward.failing = failing
    if taped:
        with taping():
            return train_with({**config, "ledger": True})
    return train_with({**config, "ledger": True})


def train_with(config: dict[str, Any]) -> Any:
    model = shard_model(tiny(), config)
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        rows = 2 if step == ODD and engine.mesh.world.rank == 1 else 4
        generator = torch.Generator().manual_seed(step * 2 + engine.mesh.world.rank)
        loss = model(torch.randn(rows, FEATURES, generator=generator)).pow(2).mean()
        losses.append(loss.item())
        if step != SKIPPED:
            (3 * loss).backward()
            losses.append(float(clip_grad_norm_(model, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if step == EVALUATED:
            with torch.no_grad():
                losses.append(model(torch.ones(3, FEATURES)).sum().item())
        del loss
    counted = {name: number for name, number in engine.ledger.calls.items() if "reduce" in name}
    return losses, full_state_dict(model), engine.replayed, counted


CONFIGS = [{"stage": stage} for stage in (0, 1, 2, 3)]
CONFIGS += [{"stage": stage, "precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}} for stage in (1, 3)]
CONFIGS += [{"stage": 3, "keep_last": 5000}, {"stage": 3, "reshard_after_forward": False}]
CONFIGS += [{"stage": 3, "persist_below": 0, "prefetch": {"forward": 2}}]


@pytest.mark.ranks
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_replayed_steps_are_eager_ones_bit_for_bit_and_ranks_take_the_same_way(
    ranks: Any, config: dict[str, Any]
) -> None:
    plain = ranks(2)(train, config, False)
    taped = ranks(2)(train, config, True)
    for (losses, state, _, counted), (same, also, replayed, recounted) in zip(plain, taped, strict=True):
        assert losses == same
        assert all(torch.equal(value, also[name]) for name, value in state.items())
        assert replayed == STEPS - WARMUP - 1
        assert counted == recounted


@pytest.mark.ranks
def test_a_capture_that_fails_on_one_rank_is_dropped_on_all(ranks: Any) -> None:
    plain = ranks(2)(train, {"stage": 3}, False)
    failing = ranks(2)(train, {"stage": 3}, True, (1,))
    assert [losses for losses, *_ in plain] == [losses for losses, *_ in failing]
    assert [result[2] for result in failing] == [0, 0]
