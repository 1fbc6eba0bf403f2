"""The meter says which unit of which rank computes long, and that the others wait for it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.runtime.api import engine_of, shard_model
from ourshard.runtime.meter import Spent, Totals, seconds_of, since

from tests.ranks.nets import numbers, square_loss, toy

SLOW = "blocks.1"
NAP = 0.3  # seconds that it takes longer on rank 1; of other spans, which a busy machine draws out, far less is asked


def nap_once(store: dist.Store, key: str, passed: int) -> None:
    """Sleep from when the other rank is beyond the slow unit: it waits for this one meanwhile."""
    while int(store.add(key, 0)) < passed:
        time.sleep(0.001)
    time.sleep(NAP)


def measured(stage: int, key: str) -> tuple[list[float], Totals, Totals, float]:
    """Return the losses without and with a meter, its sums over two steps and over an evaluation, and the time."""
    model = shard_model(toy(), {"stage": stage, "persist_below": 8})
    engine = engine_of(model)
    assert engine is not None
    slow, store = dict(model.named_modules())[SLOW], dist.distributed_c10d._get_default_store()

    def step() -> float:
        loss = square_loss(model, numbers(0, 4))
        loss.backward()
        model.zero_grad()
        return loss.item()

    losses = [step()]
    if dist.get_rank() == 0:
        hook = slow.register_forward_hook(lambda module, inputs, output: store.add(key, 1) and None)
    else:
        passed = itertools.count(1)
        hook = slow.register_forward_pre_hook(lambda module, inputs: nap_once(store, key, next(passed)))
    meter = engine.measuring.start()
    began = time.perf_counter()
    losses += [step(), step()]
    trained, seconds = meter.totals(), time.perf_counter() - began
    hook.remove()
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


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_a_slow_unit_shows_on_its_rank_and_as_waiting_on_the_other(ranks: Any, tmp_path: Any, stage: int) -> None:
    (losses, quick, evaluated, seconds), (_, slow, _, slow_seconds) = ranks(2)(measured, stage, str(tmp_path))
    assert len(set(losses)) == 1
    assert slow[Spent.UNIT, SLOW] > 2 * NAP > quick[Spent.UNIT, SLOW]
    assert seconds_of(quick, Spent.GATHER, Spent.REDUCE, Spent.AGREE) > NAP
    assert seconds > seconds_of(quick, *Spent) > 2 * NAP
    assert slow_seconds > seconds_of(slow, *Spent)
    assert seconds_of(evaluated, *Spent) == 0
    assert {label for kind, label in quick if kind is Spent.PHASE} == {"forward", "backward"}
