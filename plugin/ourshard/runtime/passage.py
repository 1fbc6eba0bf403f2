"""A forward or backward of a unit, while it lasts, for those who look: a meter, a profiler that runs."""

from __future__ import annotations

from ourshard.runtime.meter import Meter, Spent
from ourshard.runtime.streams import profiler_range


class Passage:
    """A span of the meter's and a range of the profiler's, `ourshard::forward UNIT` or `ourshard::backward UNIT`."""

    def __init__(self, meter: Meter | None, phase: str, label: str) -> None:
        self._range = profiler_range(f"ourshard::{phase} {label}")
        self._range.__enter__()
        self._meter = meter
        self._span = meter.open(Spent.UNIT, label) if meter is not None else None

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close(self._span)
        self._range.__exit__(None, None, None)
