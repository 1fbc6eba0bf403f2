"""What ranks agree on before a captured step, with real ranks; the capture itself is held by tests/gpu/graphs.py.

On CPUs nothing can be captured: what stands for a capture here runs the step eagerly when it is replayed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ourshard.runtime import engine as engine_module
from ourshard.runtime.api import engine_of, full_state_dict, shard_model
from ourshard.runtime.graph_policy import WARMUP, Inputs
from ourshard.runtime.graphs import Captured, GraphedForward

from tests.integrations.tiny import FEATURES, tiny

STEPS, ODD, SKIPPED = 9, 5, 7  # the steps in which rank 1 has another shape, and in which no backward follows


class Stand(Captured):
    """Stands for a captured step."""

    def __init__(self, graphs: Any, inputs: Inputs) -> None:
        self._engine, self._run, self._graded = graphs._engine, graphs._eager, [0]
        self._ticket = lambda: None  # type: ignore[assignment]
        self.anchor = torch.zeros(1, requires_grad=True)
        self.differentiable = {0}

    def fill(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def play_forward(self) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            self._kept = self._run(tuple(self._inputs.leaves), {})
        return (self._kept.detach(),)

    def play_backward(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        self._engine.control.agree("the backward of a captured step")
        self._kept.backward(grads[0])

    def put_together(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        return outputs[0]


class Standing(GraphedForward):
    """A forward whose captures stand for themselves; on `failing` ranks they fail."""

    failing: tuple[int, ...] = ()

    def __init__(self, engine: Any) -> None:
        self._made_for = engine

    def attach(self, *model: Any) -> None:
        if model:
            super().__init__(self._made_for, model[0])
        super().attach()

    def _eager(self, args: Any, kwargs: Any = None) -> Any:
        return super()._eager(args, kwargs or {})

    def _recorded(self, inputs: Inputs) -> Captured:
        if self._engine.mesh.world.rank in self.failing:
            raise RuntimeError("the model reads a value")
        return Stand(self, inputs)


def train(stage: int, graphs: bool, failing: tuple[int, ...] = ()) -> Any:
    before = engine_module.RootHooks
    Standing.failing = failing
    if graphs:
        engine_module.RootHooks = Standing  # type: ignore[misc,assignment]
    try:
        model = shard_model(tiny(), {"stage": stage})
    finally:
        engine_module.RootHooks = before  # type: ignore[misc]
    engine = engine_of(model)
    assert engine is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        rows = 2 if step == ODD and engine.mesh.world.rank == 1 else 4
        generator = torch.Generator().manual_seed(step * 2 + engine.mesh.world.rank)
        loss = model(torch.randn(rows, FEATURES, generator=generator)).pow(2).mean()
        losses.append(loss.item())
        if step != SKIPPED:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
    return losses, full_state_dict(model), engine.replayed


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_replay_together_and_run_eagerly_together_where_one_of_them_must(ranks: Any, stage: int) -> None:
    plain = ranks(2)(train, stage, False, timeout=60)
    replaying = ranks(2)(train, stage, True, timeout=60)
    for (losses, state, _), (same, also, replayed) in zip(plain, replaying, strict=True):
        assert losses == same
        assert all(torch.equal(value, also[name]) for name, value in state.items())
        assert replayed == STEPS - WARMUP - 1


@pytest.mark.ranks
def test_a_capture_that_fails_on_one_rank_is_dropped_on_all(ranks: Any) -> None:
    plain = ranks(2)(train, 3, False, timeout=60)
    failing = ranks(2)(train, 3, True, (1,), timeout=60)
    assert [losses for losses, _, _ in plain] == [losses for losses, _, _ in failing]
    assert [replayed for _, _, replayed in failing] == [0, 0]
