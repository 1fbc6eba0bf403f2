"""Which gradients exist: what ranks tell each other at the end of a backward that syncs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ourshard.runtime.schedule import Action, Event

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.unit import Unit


def settle(engine: Engine, behind: Collection[Unit]) -> None:
    """Agree which units have gradients left over and which parameters have one on any rank; reduce and show them.

    Collective, at the end of every backward that syncs; the agreement is on the host. `zero_grad` and users look at
    gradients right after, so that it can't wait. Buffers that forwards updated become the same on all ranks.
    `behind`: units whose gradients were not all reduced when the last one had arrived.
    """
    lanes = [lane for lane in engine.lanes() if lane.trainable]
    arrived = [unit in behind and unit.has_arrived() for unit in engine.units]
    flags = arrived + [flag for lane in lanes for flag in lane.has_gradients()]
    failed = engine.read_disk is not None and engine.read_disk.shards.failure is not None
    spent = engine.in_backward.end_backward() if engine.in_backward is not None else []
    known = engine.control.any_of([*flags, *engine.buffers.flags(), *spent, failed], "exchange of used parameters")
    if known.pop() and engine.read_disk is not None:
        engine.read_disk.raise_failure()
    if engine.in_backward is not None:
        engine.in_backward.check_late(known)
    for unit in engine.units:
        if known[unit.index]:
            engine.perform(Event(Action.REDUCE, unit.index))
    start = len(engine.units)
    engine.used_alike = known[start:] == flags[start:]
    for lane in lanes:
        stop = start + len(lane.touched)
        lane.settle(known[start:stop])
        start = stop
    engine.buffers.share(known[start:])
