"""The order of collectives: recorded once, then followed by every rank.

Note [Recorded order]
---------------------
A phase is one forward of the root, or one backward. The first time, each event (gather a unit, reduce a unit) is agreed
on by all ranks and recorded (`control.py`). From then on a rank follows the record without asking:

* the next `depth` gathers of the record are issued ahead of their use (prefetch);
* a rank that skips units (an expert without tokens, a tower without images) still takes part in their collectives
  when it passes their place in the record, or at the end of the phase: gathers are thrown away, reductions give zeros;
* a rank that wants an event which the rest of the record does not have asks the others. If all ask for
  the same, the order has changed for everyone, and the rest of the phase is recorded anew; if not, all get an error
  that says who is where.

So all ranks issue the same sequence, always, and no rank waits for a collective that another will not issue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ourshard.runtime.control import Control
    from ourshard.runtime.unit import Unit


class Action(Enum):
    """What happens to a unit."""

    GATHER = "gather"
    REDUCE = "reduce"


class Event(NamedTuple):
    """One step of the order; `unit` is the unit's index."""

    action: Action
    unit: int


class Schedule:
    """Follow or record the order of one model's collectives."""

    def __init__(self, control: Control, units: list[Unit], perform: Callable[[Event], None]) -> None:
        self._control = control
        self._units = units
        self._perform = perform  # issues the collective of an event, once
        self._plans: dict[Hashable, list[Event]] = {}
        self.phase: Hashable | None = None
        self._depth = 0
        self._plan: list[Event] = []  # of the current phase
        self._issued = 0  # events of the plan that were issued
        self._reached = 0  # events of the plan up to the last one that this rank asked for
        self._recording = False

    def begin(self, phase: Hashable, depth: int) -> None:
        """Start a phase; ends the current one first, if its end was lost to an exception."""
        self.phase = phase
        self._depth = depth
        self._recording = phase not in self._plans
        self._plan = [] if self._recording else self._plans[phase]
        self._issued = self._reached = 0

    def end(self) -> None:
        """Take part in what is left of the record, and keep the record if it is new."""
        if self.phase is None:
            return
        if self._recording:
            self._plans[self.phase] = hoist(self._plan, self._depth)
        while self._issued < len(self._plan) and not self._recording:
            self._issue(self._plan[self._issued])
        self.phase = None

    def abandon(self) -> None:
        """Leave a phase after an exception; what was recorded in it is forgotten."""
        self.phase = None

    def forget(self) -> None:
        """Forget all records: the model changed."""
        self._plans.clear()

    def need(self, action: Action, unit: Unit) -> None:
        """Issue the event, in its place in the order, and prefetch what follows."""
        event = Event(action, unit.index)
        if self._control.world == 1:
            self._perform(event)
        elif self.phase is None:
            self._control.agree(self._label(event))
            self._perform(event)
        elif self._recording:
            self._record(event)
        else:
            self._follow(event)

    def passed(self, unit: Unit) -> None:
        """Note that a unit gathered ahead is in use now, and prefetch what follows."""
        if self.phase is None or self._recording or self._reached >= self._issued:
            return
        event = Event(Action.GATHER, unit.index)
        for place in range(self._reached, self._issued):
            if self._plan[place] == event:
                self._reached = place + 1
                self._prefetch()
                return

    def _follow(self, event: Event) -> None:
        place = self._find(event)
        if place is None:
            self._control.agree(self._label(event))
            self._plan = self._plan[: self._issued]
            self._recording = True
            self._record(event, agreed=True)
            return
        while self._issued <= place:
            self._issue(self._plan[self._issued])
        self._reached = place + 1
        self._prefetch()

    def _find(self, event: Event) -> int | None:
        plan, issued = self._plan, self._issued
        if issued < len(plan) and plan[issued] == event:
            return issued
        try:
            return plan.index(event, issued)
        except ValueError:
            return None

    def _record(self, event: Event, agreed: bool = False) -> None:
        if not agreed:
            self._control.agree(self._label(event))
        self._plan.append(event)
        self._issued = self._reached = len(self._plan)
        self._perform(event)

    def _prefetch(self) -> None:
        ahead = sum(1 for event in self._plan[self._reached : self._issued] if event.action is Action.GATHER)
        while ahead < self._depth and self._issued < len(self._plan):
            event = self._plan[self._issued]
            if event.action is not Action.GATHER:
                return
            self._issue(event)
            ahead += 1

    def _issue(self, event: Event) -> None:
        self._issued += 1
        self._perform(event)

    def _label(self, event: Event) -> str:
        phase = self.phase[0] if isinstance(self.phase, tuple) else "outside of a forward"
        return f"{event.action.value} {self._units[event.unit].label} ({phase})"


def hoist(events: list[Event], depth: int) -> list[Event]:
    """Return the order with each gather moved ahead of the reductions that its prefetch should not wait for.

    With `depth` gathers in flight, the gather number i + depth is issued when number i is asked for.
    """
    gathers = [event for event in events if event.action is Action.GATHER]
    order: list[Event] = []
    emitted = wanted = 0
    for event in events:
        if event.action is Action.REDUCE:
            order.append(event)
            continue
        wanted += 1
        until = min(wanted + depth, len(gathers))
        order.extend(gathers[emitted:until])
        emitted = max(emitted, until)
    return order
