"""Where the time of steps goes on this rank, unit by unit. Nothing is measured until someone asks for it.

Note [Spans]
------------
A span is a stretch of time with a kind and a label. On a GPU it lies between two events on the compute stream, so that
a wait is as long as that stream stood still, and nobody waits for the figures: those of spans that have passed are
read. On a CPU, where collectives are synchronous, it lies between two looks at the clock. Spans nest: a span's own time
is what its inner ones leave, so a unit's is computation, and a phase's that of the root. Forwards without gradient are
left out: an evaluation is no part of a step. What the host alone waits for (words between ranks) is no part of a GPU's
time, and nests on CPUs only.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ourshard.runtime.streams import Streams


class Spent(Enum):
    """What time went into."""

    GATHER = "gather"  # compute waited for whole parameters; the label is the unit's where it is known
    REDUCE = "reduce"  # compute waited for a reduction
    INPUT = "input"  # compute waited for an input of a recomputed unit, on its way to the host or back
    AGREE = "agree"  # the host waited for words of other ranks
    UNIT = "unit"  # a unit's forward or backward
    PHASE = "phase"  # what a forward or backward of the model has outside of units


Totals = dict[tuple[Spent, str], float]  # seconds by kind and label


class Span:
    """One stretch of time: Note [Spans]. `start` and `end` are events of a GPU or seconds."""

    __slots__ = ("end", "inside", "kind", "label", "outer", "start")

    def __init__(self, kind: Spent, label: str, start: Any, outer: Span | None = None) -> None:
        self.kind = kind
        self.label = label
        self.start = start
        self.end: Any = None
        self.outer = outer
        self.inside = 0.0  # seconds of inner spans that were read

    def passed(self) -> bool:
        """Say whether it can be read: the GPU is beyond it."""
        return isinstance(self.end, float) or bool(self.end.query())

    def read(self) -> float:
        """Return its own seconds, and tell the span around it."""
        on_host = isinstance(self.end, float)
        seconds = self.end - self.start if on_host else float(self.start.elapsed_time(self.end)) / 1e3
        if self.outer is not None:
            self.outer.inside += seconds
        return max(0.0, seconds - self.inside)


class Meter:
    """Sums of spans by kind and label since it was made. All methods are for the thread that trains."""

    def __init__(self, streams: Streams) -> None:
        self.muted = False  # by a forward without gradient
        self._streams = streams
        self._events: list[Any] = []  # of spans that were read, for later ones: an event is dear to make
        self._open: list[Span] = []
        self._closed: deque[Span] = deque()
        self._totals: Totals = {}

    def open(self, kind: Spent, label: str) -> Span | None:
        """Begin a span; None while muted, and for a wait on a stream that is not compute's."""
        if self.muted:
            return None
        if self._streams.on_gpu:
            if kind is Spent.AGREE:
                return Span(kind, label, time.perf_counter())
            if self._streams.beside_compute():
                return None
        span = Span(kind, label, self._now(), self._open[-1] if self._open else None)
        self._open.append(span)
        return span

    def close(self, span: Span | None) -> None:
        """End a span, whichever of the open ones it is."""
        if span is None or span.end is not None:
            return
        span.end = time.perf_counter() if isinstance(span.start, float) else self._now()
        if span in self._open:
            self._open.remove(span)
        self._closed.append(span)

    @contextmanager
    def span(self, kind: Spent, label: str) -> Iterator[None]:
        """Measure a `with` block. Where it raises, nothing is added."""
        span = self.open(kind, label)
        yield
        self.close(span)

    def abandon(self) -> None:
        """Forget open spans, after an exception."""
        self.muted = False
        self._open.clear()

    def totals(self) -> Totals:
        """Return the sums so far, of spans that have passed."""
        while self._closed and self._closed[0].passed():
            span = self._closed.popleft()
            key = span.kind, span.label
            self._totals[key] = self._totals.get(key, 0.0) + span.read()
            if not isinstance(span.end, float):
                self._events += span.start, span.end
        return dict(self._totals)

    def _now(self) -> Any:
        if not self._streams.on_gpu:
            return time.perf_counter()
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def since(totals: Totals, before: Totals) -> Totals:
    """Return what was added to `before`."""
    return {key: seconds - before.get(key, 0.0) for key, seconds in totals.items()}


def seconds_of(totals: Totals, *kinds: Spent) -> float:
    """Return the seconds of some kinds, over all labels."""
    return sum(seconds for (kind, _), seconds in totals.items() if kind in kinds)


class Measuring:
    """The meter of an engine, while someone asks for it, and the phase that runs."""

    def __init__(self, streams: Streams, parts: Iterable[Any]) -> None:
        self.meter: Meter | None = None
        self.watched = False  # the phase that runs, by a meter or a profiler; asked once a phase, not by each unit
        self._streams = streams
        self._parts = tuple(parts)  # that wait, and tell the meter
        self._users: Counter[bool] = Counter()  # by whether they want units and phases too
        self._phase: Span | None = None

    def start(self, parts: bool = True) -> Meter:
        """Measure until `stop`, on this rank; without `parts` waits alone, which are fewer events.

        Several may, each with a `stop`, and share one meter.
        """
        self._users[parts] += 1
        if self.meter is None:
            self._use(Meter(self._streams))
        assert self.meter is not None
        return self.meter

    def stop(self, parts: bool = True) -> None:
        """End what one `start` began, which was given the same."""
        self._users[parts] -= 1
        if not self._users.total():
            self._use(None)

    def _use(self, meter: Meter | None) -> None:
        self.meter = meter
        for part in self._parts:
            part.meter = meter

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing for a while: events that CUDA captures have no time."""
        meter = self.meter
        self._use(None)
        try:
            yield
        finally:
            self._use(meter)

    def begin_phase(self, name: str, counts: bool = True) -> None:
        """Open a forward or backward; one that does not count is left out with all that happens in it."""
        by_parts = self.meter is not None and self._users[True] > 0
        self.watched = by_parts or torch.autograd._profiler_enabled()
        if self.meter is not None:
            self.meter.muted = not counts
            self._phase = self.meter.open(Spent.PHASE, name) if by_parts else None

    def end_phase(self) -> None:
        if self.meter is not None:
            self.meter.close(self._phase)
            self.meter.muted = False

    def abandon(self) -> None:
        """Forget what an exception left open."""
        self._phase = None
        if self.meter is not None:
            self.meter.abandon()
