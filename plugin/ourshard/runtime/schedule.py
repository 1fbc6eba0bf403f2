"""The order of collectives: recorded once, then followed by every rank.

Note [Recorded order]
---------------------
A phase is one forward of the root, or one backward. Ranks tell each other which phase they begin, and compare when it
ends: nobody waits for the others, and two ranks that run different phases both raise.

The first time, each event (gather a unit, reduce a unit) is agreed on by all ranks and recorded. Where ranks want
different events (an expert that only one of them uses) they take turns: all do one rank's event, then ask again, until
every rank is at the end. From then on a rank follows the record without asking:

* the next `depth` gathers of the record are issued ahead of their use (prefetch);
* a reduction is issued in its turn, once this rank has all gradients, or will get none; one that is ready before its
  turn waits;
* a rank that skips units (an expert without tokens, a tower without images) still takes part in their collectives
  when it passes their place in the record, or at the end of the phase: gathers are thrown away, reductions give zeros;
* a rank that needs a gather which the rest of the record does not have asks the others. If all ask, the order has
  changed, and the rest of the phase is recorded anew; if not, all get an error that says who is where;
* gradients that come after their reduction, or have none in the record, are left over: `Engine.finish_backward`.

So all ranks issue the same sequence, always, and no rank waits for a collective that another will not issue.
"""

from __future__ import annotations

import itertools
from collections import deque
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

    joins = False  # ranks without batches take part, which know of no phase: `joining.py`

    def __init__(self, control: Control, units: list[Unit], perform: Callable[[Event], None], name: str = "") -> None:
        self._control = control
        self._units = units
        self._perform = perform  # issues the collective of an event, once
        self._name = name  # of the model, in what ranks tell each other
        self._plans: dict[Hashable, tuple[list[Event], list[int]]] = {}  # with the gathers before each place
        self.phase: tuple[str, Hashable] | None = None
        self._depth = 0
        self._plan: list[Event] = []  # of the current phase
        self._gathers: list[int] = []  # before each place of the plan, if it is a record
        self._issued = 0  # events of the plan that were issued
        self._reached = 0  # events of the plan up to the last gather that this rank asked for
        self._recording = False
        self._keeps = True  # a record: not a rank that is alone and has all parameters on its device
        self._ready: set[int] = set()  # units whose gradients wait for their turn to be reduced
        self._skipped: deque[Unit] = deque()  # gathered in passing, and not asked for
        self._abandoned = False  # the last phase ended in an exception, perhaps on this rank alone

    def begin(self, phase: tuple[str, Hashable], depth: int) -> None:
        """Start a phase (what it is, and what its order depends on), and gather ahead."""
        self.phase = phase
        self._depth = depth
        self._recording = phase not in self._plans
        self._plan, self._gathers = ([], []) if self._recording else self._plans[phase]
        self._issued = self._reached = 0
        self._ready.clear()
        self._skipped.clear()
        self._keeps = self._control.world > 1 or any(unit.sharded for unit in self._units)
        self._control.declare(f"{self._title} begins ({phase[1]})")
        if self._abandoned:
            self._abandoned = False
            self._control.confirm()
        if not self._recording:
            self._advance()

    def end(self) -> None:
        """Take part in what is left of the record, and keep the record if it is new."""
        if self.phase is None or not self._keeps:
            self.phase = None
            return
        if self._recording:
            self._record(None)
            plan = hoist(self._plan, self._depth)
            kinds = (event.action is Action.GATHER for event in plan)
            self._plans[self.phase] = plan, list(itertools.accumulate(kinds, initial=0))
        while self._issued < len(self._plan):
            self._pass_by(self._plan[self._issued])
        self._control.confirm()
        self.phase = None

    def abandon(self) -> None:
        """Leave a phase after an exception; what was recorded in it is forgotten."""
        self._abandoned = self._abandoned or self.phase is not None
        self.phase = None
        self._control.withdraw()

    def forget(self) -> None:
        """Forget all records: the model changed."""
        self._plans.clear()

    def need(self, action: Action, unit: Unit) -> None:
        """Gather a unit now, in its place in the order; or reduce one, in its turn."""
        event = Event(action, unit.index)
        if self.phase is None:
            self._control.agree(self._label(event))
            self._perform(event)
        elif not self._keeps:
            self._perform(event)
        elif self._recording:
            self._record(event)
        elif action is Action.GATHER:
            self._follow(event)
        else:
            self._ready.add(unit.index)
            self._advance()

    def passed(self, unit: Unit) -> None:
        """Note that a unit gathered ahead is in use now, and prefetch what follows."""
        if self.phase is None or self._recording or self._reached >= self._issued:
            return
        index, plan = unit.index, self._plan
        for place in range(self._reached, self._issued):
            if plan[place].unit == index and plan[place].action is Action.GATHER:
                self._reached = place + 1
                self._advance()
                return

    def upcoming(self, count: int) -> list[Unit]:
        """Return the units that are gathered next after what was issued, where the record has them."""
        gathers = (event for event in self._plan[self._issued :] if event.action is Action.GATHER)
        return [] if self._recording else [self._units[event.unit] for event in itertools.islice(gathers, count)]

    # ---- following -----------------------------------------------------------------------------------------

    def _follow(self, event: Event) -> None:
        """Issue a gather that this rank needs now, after all that the record has before it."""
        try:
            place = self._plan.index(event, self._issued)
        except ValueError:
            self._control.agree(self._label(event))
            self._plan = self._plan[: self._issued]
            self._recording = True
            self._add(event)
            return
        while self._issued < place:
            self._pass_by(self._plan[self._issued])
        self._issue(event)
        self._reached = place + 1
        self._advance()

    def _pass_by(self, event: Event) -> None:
        """Take part in an event that this rank does not need now; the last `depth` such gathers stay."""
        self._issue(event)
        if event.action is Action.GATHER:
            self._skipped.append(self._units[event.unit])
            if len(self._skipped) > self._depth:
                self._skipped.popleft().release_unused()

    def _advance(self) -> None:
        """Issue what is next in the record and can go now: gathers as far as `depth`, reductions that are ready."""
        plan = self._plan
        ahead = self._gathers[self._issued] - self._gathers[self._reached]
        end = len(plan)
        while self._issued < end:
            event = plan[self._issued]
            if event.action is Action.GATHER:
                if ahead >= self._depth:
                    return
                ahead += 1
            elif event.unit not in self._ready and self._units[event.unit].is_pending:
                return
            self._issue(event)

    def _issue(self, event: Event) -> None:
        self._issued += 1
        if event.action is Action.REDUCE:
            self._ready.discard(event.unit)
        self._perform(event)

    # ---- recording -----------------------------------------------------------------------------------------

    def _record(self, wanted: Event | None) -> None:
        """Take turns with the other ranks until `wanted` has been done; None: until all ranks are at the end."""
        while True:
            turn = self._next_turn(wanted)
            if turn is not None:
                self._add(turn)
            if turn == wanted:
                return

    def _add(self, event: Event) -> None:
        self._plan.append(event)
        self._issued = self._reached = len(self._plan)
        self._perform(event)

    def _next_turn(self, wanted: Event | None) -> Event | None:
        """Hear what every rank wants and choose the same on all; None when all are at the end."""
        told = self._control.agree_on(self._label(wanted), f"{self._title}: ")
        events = [event for event in map(self._read, told) if event is not None]
        return min(events, key=self._rank_of) if events else None

    def _rank_of(self, event: Event) -> tuple[bool, int]:
        """Order events that compete: gathers first; units as they come in a forward, or the reverse in a backward.

        The root is last in both: it is whole all along, and its gradients are complete at the end.
        """
        assert self.phase is not None
        place = event.unit if self.phase[0] == "forward" else len(self._units) - 2 - event.unit
        return event.action is Action.REDUCE, place if event.unit < len(self._units) - 1 else len(self._units)

    # ---- words ---------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"{self.phase[0] if self.phase else 'outside of a forward'}{self._name}"

    def _label(self, event: Event | None) -> str:
        if event is None:
            return f"{self._title}: end"
        return f"{self._title}: {event.action.value} unit {event.unit} ({self._units[event.unit].label})"

    def _read(self, label: str) -> Event | None:
        words = label.removeprefix(f"{self._title}: ").split()
        return None if words[0] == "end" else Event(Action(words[0]), int(words[2]))


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
