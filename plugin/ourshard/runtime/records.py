"""Orders of collectives as data: what is recorded, and how a record grows. Used by `schedule.py`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Action(Enum):
    """What happens to a unit."""

    GATHER = "gather"
    REDUCE = "reduce"


class Event(NamedTuple):
    """One step of the order; `unit` is the unit's index."""

    action: Action
    unit: int


@dataclass(frozen=True, slots=True)
class Record:
    """The order of one kind of phase."""

    events: list[Event]
    meets: bool  # a rank may come to need a unit that is not in it: all ranks meet at its end

    def gathers_before(self) -> list[int]:
        """Return how many gathers come before each place."""
        return list(itertools.accumulate((event.action is Action.GATHER for event in self.events), initial=0))


class Wish(NamedTuple):
    """What a rank wants next, and after how many events of the record it came to want it."""

    event: Event
    after: int = 0

    def __str__(self) -> str:
        return f"{self.event.action.value} unit {self.event.unit} after {self.after}"

    @classmethod
    def read(cls, text: str) -> Wish | None:
        """Return the wish that a text begins with; None if it says that the rank is at the end."""
        words = text.split()
        if words[0] == "end":
            return None
        return cls(Event(Action(words[0]), int(words[2])), int(words[4]) if words[3:4] == ["after"] else 0)


class Turns:
    """What ranks take turns for once a record is over: Note [Units that come to life]."""

    def __init__(self, followed: list[Event], place: int) -> None:
        self._followed = followed
        self.place = place  # of this rank in the record
        self.taken: list[Wish] = []
        self.unanimous = True  # all ranks always wished for the same

    def come_to(self, event: Event) -> None:
        """Move this rank's place behind an event, if the record still has it there."""
        if event in self._followed[self.place :]:
            self.place = self._followed.index(event, self.place) + 1

    def take(self, turn: Wish, wishes: list[Wish | None]) -> None:
        """Note whose turn it is, and what all ranks wish for."""
        self.taken.append(turn)
        self.unanimous = self.unanimous and all(wish == turn for wish in wishes)

    def grown(self) -> list[Event]:
        """Return the record with what is new in it, where it was needed; the order of turns where all had the same."""
        if self.unanimous:
            return self._followed[: self.taken[0].after] + [turn.event for turn in self.taken]
        order, places = list(self._followed), list[int]()
        for event, after in self.taken:
            if event not in order:
                order.insert(after + sum(place <= after for place in places), event)
                places.append(after)
        return order


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
