"""The order of collectives: recorded once, then followed by every rank.

Note [Recorded order]
---------------------
A phase is one forward of the root, or one backward. Ranks tell each other which phase they begin, and compare when it
ends: nobody waits for the others, and two ranks that run different phases both raise. Where the host itself waits in a
collective (gloo), they compare before the first one of the phase, which waits for all ranks anyway: gloo ends the
process, without a word of ours, when ranks bring different sizes.

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

Note [Units that come to life]
------------------------------
A record may lack units: an expert or a tower that no rank used when it was made, or that got no gradient. Later, one
rank alone may come to need one, which the others can't know. All ranks therefore meet at the end of such a phase, which
costs an agreement; also where ranks have once wished for different things, since they may again, in another order.
A rank that needs what the rest of the record lacks first takes part in that rest, which the others follow; by then they
are at its end, and all take turns until no rank wants anything more. What such a rank let go of in passing is gathered
again for it, in this phase alone: new units come into the record at the place where they were needed. The records of
backwards are forgotten when that of a forward grows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from ourshard.runtime.records import Action, Event, Record, Turns, Wish, hoist

if TYPE_CHECKING:
    from ourshard.runtime.control import Control
    from ourshard.runtime.unit import Unit

__all__ = ["Action", "Event", "Schedule"]


class Schedule:
    """Follow or record the order of one model's collectives."""

    joins = False  # ranks without batches take part, which know of no phase: `joining.py`

    def __init__(self, control: Control, units: list[Unit], perform: Callable[[Event], None], name: str = "") -> None:
        self._control = control
        self._units = units
        self._perform = perform  # issues the collective of an event, once
        self._name = name  # of the model, in what ranks tell each other
        self._records: dict[tuple[str, Hashable], tuple[Record, list[int]]] = {}  # with the gathers before each place
        self.phase: tuple[str, Hashable] | None = None
        self._depth = 0
        self._plan: list[Event] = []  # of the current phase
        self._gathers: list[int] = []  # before each place of the plan, if it is a record
        self._issued = 0  # events of the plan that were issued
        self._reached = 0  # events of the plan up to the last gather that this rank asked for
        self._recording = False
        self._meets = False  # all ranks meet at the end of the plan: Note [Units that come to life]
        self._varies: set[str] = set()  # forward, backward: what ranks have wished for different things in
        self._turns: Turns | None = None  # since the plan was over
        self._keeps = True  # a record: not a rank that is alone and has all parameters on its device
        self._ready: set[int] = set()  # units whose gradients wait for their turn to be reduced
        self._skipped: deque[Unit] = deque()  # gathered in passing, and not asked for
        self._abandoned = False  # the last phase ended in an exception, perhaps on this rank alone

    def begin(self, phase: tuple[str, Hashable], depth: int) -> None:
        """Start a phase (what it is, and what its order depends on), and gather ahead."""
        self.phase = phase
        self._depth = depth
        self._recording = phase not in self._records
        record, self._gathers = self._records.get(phase, (Record([], meets=False), []))
        self._plan = list(record.events)
        self._meets = record.meets or phase[0] in self._varies
        self._turns = None
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
        if self._meets and not self._recording and not self._control.is_silent:
            self._begin_turns()
        if self._recording:
            self._record(None)
            self._keep(self.phase)
        while self._issued < len(self._plan):
            self._pass_by(self._plan[self._issued])
        self._control.confirm()
        self.phase = self._turns = None

    def abandon(self) -> None:
        """Leave a phase after an exception; what was recorded in it is forgotten."""
        self._abandoned = self._abandoned or self.phase is not None
        self.phase = self._turns = None
        self._control.withdraw()

    def forget(self) -> None:
        """Forget all records: the model changed."""
        self._records.clear()

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
            if self._turns is not None:
                self._turns.come_to(Event(Action.GATHER, unit.index))
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
            if self._meets:
                self._begin_turns()
                self._record(event)
                return
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
        if self._control.host_waits:
            self._control.confirm()
        self._issued += 1
        if event.action is Action.REDUCE:
            self._ready.discard(event.unit)
        self._perform(event)

    # ---- recording -----------------------------------------------------------------------------------------

    def _record(self, wanted: Event | None) -> None:
        """Take turns with the other ranks until `wanted` has been done; None: until all ranks are at the end."""
        if wanted is not None and self._turns is not None:
            self._turns.come_to(wanted)
        while True:
            turn = self._next_turn(wanted)
            if turn is not None:
                self._add(turn)
                if wanted is None and turn.action is Action.GATHER:
                    self._units[turn.unit].release_unused()
            if turn == wanted:
                return

    def _begin_turns(self) -> None:
        """Take part in the rest of the record; after it ranks take turns: Note [Units that come to life]."""
        self._turns = Turns(list(self._plan), self._reached)
        while self._issued < len(self._plan):
            self._pass_by(self._plan[self._issued])
        self._recording = True

    def _keep(self, phase: tuple[str, Hashable]) -> None:
        """Keep what was recorded in a phase, or what its record has become."""
        turns = self._turns
        if turns is None:
            events = hoist(self._plan, self._depth)
        elif not turns.taken:
            return
        else:
            events = turns.grown()
            if phase[0] == "forward":
                self._records = {kept: record for kept, record in self._records.items() if kept[0] == "forward"}
        record = Record(events, meets=self._lacks_units(phase[0], events))
        self._records[phase] = record, record.gathers_before()

    def _lacks_units(self, kind: str, events: list[Event]) -> bool:
        """Say whether a rank may come to need a gather that `events` do not have.

        Of a backward: of a unit that is trained and that a forward gathers. Where none is gathered, all are whole since
        their forward.
        """
        units = [unit for unit in self._units if unit.sharded and not unit.rooted]
        gathered = _gathered(events)
        if kind == "forward":
            return any(unit.index not in gathered for unit in units)
        forward = {
            unit
            for (kept, _), (record, _) in self._records.items()
            if kept == "forward"
            for unit in _gathered(record.events)
        }
        missing = any(unit.trainable and unit.index in forward - gathered for unit in units)
        return missing and any(unit.index in gathered for unit in units)

    def _add(self, event: Event) -> None:
        self._plan.append(event)
        self._issued = self._reached = len(self._plan)
        self._perform(event)

    def _next_turn(self, wanted: Event | None) -> Event | None:
        """Hear what every rank wants and choose the same on all; None when all are at the end."""
        assert self.phase is not None
        told = self._control.agree_on(self._label(wanted), f"{self._title}: ")
        wishes = [Wish.read(text.removeprefix(f"{self._title}: ")) for text in told]
        turn = min((wish for wish in wishes if wish), key=lambda wish: self._rank_of(wish.event), default=None)
        if turn is None:
            return None
        if any(wish != turn for wish in wishes):
            self._varies.add(self.phase[0])
        if self._turns is not None:
            self._turns.take(turn, wishes)
        return turn.event

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
        after = f" after {self._turns.place}" if self._turns is not None else ""
        unit = self._units[event.unit].label
        return f"{self._title}: {event.action.value} unit {event.unit}{after} ({unit})"


def _gathered(events: list[Event]) -> set[int]:
    return {event.unit for event in events if event.action is Action.GATHER}
