"""Which gradients exist: what ranks tell each other at the end of a backward that syncs.

Note [Gradients that wait]
--------------------------
Backwards in `no_sync`, and those of an accumulation before its last, leave gradients that are each rank's own, or the
mean of a part of the ranks. They wait for a backward that syncs. A step, a look for overflows and clipping may come
before it: a loop that clips after each micro-batch, or ends in the middle of an accumulation. They are to see what they
would see in one process, so what waits is reduced then, and later backwards add to it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ourshard.runtime.schedule import Action, Event
from ourshard.runtime.shown import hide_gradients, show_gradients

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.unit import Unit


def bring_in_waiting(engine: Engine) -> None:
    """Reduce what backwards that did not sync have left: Note [Gradients that wait]. Collective where there is any."""
    if not engine.unsynced:
        return
    engine.control.agree("a step or clipping with gradients that wait for a backward that syncs")
    engine.land_masters()
    hide_gradients(engine.held)
    asked, engine.sync_backward = engine.sync_backward, True
    try:
        for unit in (*reversed(engine.units[:-1]), engine.root):
            unit.reduced = False
            if unit.lanes_due():
                engine.perform(Event(Action.REDUCE, unit.index))
        settle(engine, engine.units)
    finally:
        engine.sync_backward = asked
    engine.streams.join()
    engine.in_flight.forget()
    engine.land_masters()
    show_gradients(engine.held)


def settle(engine: Engine, behind: Collection[Unit]) -> None:
    """Agree which units have gradients left over and which parameters have one on any rank; reduce and show them.

    Collective, at the end of every backward that syncs, and nothing at that of another; the agreement is on the host.
    `zero_grad` and users look at gradients right after, so that it can't wait. Buffers that forwards updated become the
    same on all ranks. `behind`: units whose gradients were not all reduced when the last one had arrived.
    """
    engine.unsynced = not engine.sync_backward
    if engine.unsynced:
        return
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
