"""The order of gathers and reductions of two settled steps, as text, for each stage: `golden/*.txt`.

After a change that is meant, write the files anew and read what changed:

    OURSHARD_WRITE_TRACES=1 pytest tests/trace
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.nets import square_loss, toy

pytestmark = [pytest.mark.ranks, pytest.mark.trace]

GOLDEN = Path(__file__).parent / "golden"

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage0": (2, {"stage": 0}),
    "stage1": (2, {"stage": 1}),
    "stage2": (2, {"stage": 2}),
    "stage3": (2, {"stage": 3}),
    "stage3_whole_until_backward": (2, {"stage": 3, "reshard_after_forward": False}),
    "stage3_last_whole_until_backward": (2, {"stage": 3, "keep_last": 2 * 832}),
    "stage3_deferred": (2, {"stage": 3, "accumulate": "deferred"}),
    "stage3_checkpointed": (2, {"stage": 3, "activation_checkpointing": True}),
    "stage3_no_prefetch": (2, {"stage": 3, "prefetch": {"forward": 0, "backward": 0}}),
    "stage3_optimizer_on_the_host": (2, {"stage": 3, "offload": {"optimizer": "cpu"}}),
    "stage3_secondary": (4, {"stage": 3, "secondary_shard_size": 2}),
    "hybrid": (4, {"stage": 3, "shard_size": 2}),
    "hybrid_optimizer_over_all": (4, {"stage": 3, "shard_size": 2, "shard_optimizer_over": "all"}),
}
MICRO_BATCHES = 2


def steps(config: dict[str, Any]) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Train three steps of two micro-batches; return events, gathers and collectives of the last, settled one."""
    import torch
    from ourshard import clip_grad_norm_, engine_of, shard_model

    from tests.ranks.nets import numbers

    model = shard_model(toy(), {**config, "persist_below": 20, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        if step == 2:
            engine.ledger.reset()
            engine.ledger.trace = []
        for micro in range(MICRO_BATCHES):
            engine.ledger.note(f"-- micro-batch {micro}")
            with contextlib.nullcontext() if micro == MICRO_BATCHES - 1 else engine.no_sync():
                square_loss(model, numbers(step, 2)).backward()
        engine.ledger.note("-- clip and step")
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ledger = engine.ledger
    assert ledger.trace is not None
    return ledger.trace, dict(ledger.gathers), dict(ledger.calls)


def text_of(trace: list[str], calls: dict[str, int]) -> str:
    counts = [f"{name}: {number}" for name, number in sorted(calls.items())]
    return "\n".join([*trace, "", "collectives:", *counts]) + "\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_order_of_collectives_is_the_golden_one_on_every_rank(ranks, name):
    world, config = CONFIGS[name]
    seen = [text_of(trace, calls) for trace, _, calls in ranks(world)(steps, config)]
    assert seen == [seen[0]] * world
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("OURSHARD_WRITE_TRACES"):
        path.write_text(seen[0])
    assert seen[0] == path.read_text()


def test_a_checkpointed_unit_is_gathered_twice_a_micro_batch(ranks):
    """E06: once for its forward and once for its backward, in which it is recomputed too."""
    for _, gathers, _ in ranks(2)(steps, CONFIGS["stage3_checkpointed"][1]):
        units = {name: number for name, number in gathers.items() if name.startswith("blocks")}
        assert units == {f"blocks.{index}": 2 * MICRO_BATCHES for index in range(3)}
        assert gathers["the root unit"] <= 2 * MICRO_BATCHES
