"""The meter says which unit of which rank computes long, and that the others wait for it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.runtime.api import engine_of, shard_model
from ourshard.runtime.meter import Spent, Totals, seconds_of, since

from tests.ranks.nets import numbers, square_loss, toy

NAP = 0.15  # seconds that block 1 of rank 1 takes longer


def measured(stage: int) -> tuple[list[float], Totals, Totals, float]:
    """Return the losses without and with a meter, its sums over two steps and over an evaluation, and the time."""
    model = shard_model(toy(), {"stage": stage, "persist_below": 8})
    engine = engine_of(model)
    assert engine is not None
    slow = dict(model.named_modules())[SLOW]

    def step() -> float:
        loss = square_loss(model, numbers(0, 4))
        loss.backward()
        model.zero_grad()
        return loss.item()

    losses = [step()]
    if dist.get_rank() == 1:
        slow.register_forward_pre_hook(lambda module, inputs: time.sleep(NAP))
    meter = engine.measuring.start()
    began = time.perf_counter()
    losses += [step(), step()]
    trained, seconds = meter.totals(), time.perf_counter() - began
    with torch.no_grad():
        square_loss(model, numbers(0, 4))
    evaluated = since(meter.totals(), trained)
    engine.measuring.stop()
    assert engine.measuring.meter is None
    waits = engine.measuring.start(parts=False)
    losses.append(step())
    assert waits.totals()
    assert not {Spent.UNIT, Spent.PHASE} & {kind for kind, _ in waits.totals()}
    engine.measuring.stop(parts=False)
    assert engine.measuring.meter is None
    losses.append(step())
    return losses, trained, evaluated, seconds


SLOW = "blocks.1"


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_a_slow_unit_shows_on_its_rank_and_as_waiting_on_the_other(ranks: Any, stage: int) -> None:
    (losses, quick, evaluated, seconds), (_, slow, _, _) = ranks(2)(measured, stage)
    assert len(set(losses)) == 1
    assert slow[Spent.UNIT, SLOW] > 2 * NAP > 10 * quick[Spent.UNIT, SLOW]
    waited = [seconds_of(totals, Spent.GATHER, Spent.REDUCE, Spent.AGREE) for totals in (quick, slow)]
    assert waited[0] - waited[1] > 1.5 * NAP
    assert seconds > seconds_of(quick, *Spent) > 2 * NAP
    assert seconds_of(evaluated, *Spent) == 0
    assert {label for kind, label in quick if kind is Spent.PHASE} == {"forward", "backward"}
