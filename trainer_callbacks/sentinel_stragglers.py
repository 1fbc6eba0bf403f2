"""Which rank computes longer than the others, and in which unit: from the engine's meter, gathered rarely."""

from __future__ import annotations

import statistics
from typing import Any

from ourshard.runtime.engine import Engine
from ourshard.runtime.meter import Spent, Totals, seconds_of, since

STEPS = 5  # that are measured for one comparison
_OWN = (Spent.UNIT, Spent.PHASE, Spent.INPUT)  # what a rank spends by itself, whatever the others do


class StragglerWatch:
    """Measures this rank's own time until `find`. What a rank waits for others is not its own: a slow one waits least.

    Only what the engine sees counts, forwards and backwards: not data, and not the Trainer's own collectives.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._meter = engine.measuring.start()
        self._before: Totals = self._meter.totals()

    def end(self) -> None:
        """Measure no longer."""
        self._engine.measuring.stop()

    def find(self, steps: int, factor: float) -> str | None:
        """Return who computed more than `factor` times as long as the others in `steps` steps. Collective.

        On a GPU the last events may be on their way; they are left out, and nobody waits for them.
        """
        spent = since(self._meter.totals(), self._before)
        own = {_name(*key): seconds / steps for key, seconds in spent.items() if key[0] in _OWN}
        waited = seconds_of(spent, Spent.GATHER, Spent.REDUCE, Spent.AGREE) / steps
        told: list[Any] = self._engine.control.gather_objects((own, waited), "sentinel: stragglers")
        return compare([each for each, _ in told], [each for _, each in told], factor)


def _name(kind: Spent, label: str) -> str:
    if kind is Spent.INPUT:
        return "waiting for inputs of units from the host"
    return f"unit {label}" if kind is Spent.UNIT else f"the {label} outside of units"


def compare(own: list[dict[str, float]], waited: list[float], factor: float) -> str | None:
    """Return the text about the slowest rank, if it is one; `own` has seconds a step by part, for each rank."""
    if len(own) < 2:
        return None
    sums = [sum(parts.values()) for parts in own]
    slow = max(range(len(own)), key=sums.__getitem__)
    others = [rank for rank in range(len(own)) if rank != slow]
    usual = statistics.median(sums[rank] for rank in others)
    if sums[slow] <= factor * usual:
        return None
    usual_by_part = {part: statistics.median(own[rank].get(part, 0.0) for rank in others) for part in own[slow]}
    part = max(own[slow], key=lambda part: own[slow][part] - usual_by_part[part])
    return (
        f"rank {slow} computes {1e3 * sums[slow]:.3g} ms a step, the others {1e3 * usual:.3g}; most of that in "
        f"{part}: {1e3 * own[slow][part]:.3g} ms, the others {1e3 * usual_by_part[part]:.3g}. They wait "
        f"{1e3 * statistics.median(waited[rank] for rank in others):.3g} ms a step."
    )
