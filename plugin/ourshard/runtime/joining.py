"""Uneven inputs: ranks that have run out of batches keep answering the collectives of the ranks that have not.

Note [Joining]
--------------
Outside of a join all ranks follow one recorded order (`schedule.py`), and a rank that stops would leave the others
waiting. Inside of a join nothing is recorded or prefetched. Before each event a rank that has work says on the host
what it is about to do; a rank without batches says nothing, hears it, and does the same with nothing to give: its
shard for a gather, zeros for a reduction. What it receives counts: its part of the gradients and of the optimizer
stays current, which in DDP only a broadcast of the last rank's weights could bring.

Gradients are the mean over all ranks, also those without batches, as DDP's join has it. Calls above the engine (an
optimizer's step, clipping) are announced by name and made by all ranks, so that what they do inside needs no word.

torch's `Join` counts who still has work: `Seat` is the `Joinable` that stands for all engines of a join.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ourshard.runtime.coded import codes_now
from ourshard.runtime.schedule import Action, Event
from ourshard.runtime.settling import settle

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.unit import Unit

_BEGIN, _END, _CALL = "begin", "end", "call"


class Seat(Joinable):
    """The engines that join together, and the calls that all their ranks make together."""

    def __init__(self, engines: Sequence[Engine], calls: dict[str, Callable[[Any], None]]) -> None:
        super().__init__()
        self._engines = list(engines)
        self._calls = calls  # name -> what a rank without batches does, given the caller's payload
        self._control = engines[0].control  # all words of a join go over one group
        self._quiet = False  # inside of a call that was announced

    # ---- torch's Joinable ----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._control.group

    # ---- a rank with work ----------------------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[None]:
        """Announce every event of the engines, while this rank has batches. No-op where the join is disabled."""
        if not self._join_config.enable:
            yield
            return
        before = [engine.schedule for engine in self._engines]
        for index, engine in enumerate(self._engines):
            engine.schedule = _Announcing(self, index, engine)  # type: ignore[assignment]
        try:
            yield
        finally:
            for engine, schedule in zip(self._engines, before, strict=True):
                engine.schedule = schedule

    def say(self, *words: Any) -> None:
        """Tell the other ranks what this one does next; raise `DesyncError` if one with work does something else."""
        if not self._quiet:
            self._agreed(" ".join(str(word) for word in words))

    def call(self, name: str, payload: Any, function: Callable[[], Any]) -> Any:
        """Make a call that ranks without batches make too, with the payload of the lowest rank that has work."""
        if self._quiet or not self._join_config.enable:
            return function()
        speaker, _ = self._agreed(f"{_CALL} {name}")
        self._share(speaker, payload)
        with self._announced():
            return function()

    def _agreed(self, words: str) -> tuple[int, str]:
        """Exchange words with all ranks; return the lowest rank that has some, and its words."""
        counted = Join.notify_join_context(self)
        if counted is not None:
            counted.wait()
        return self._control.first_of(words)

    def _share(self, speaker: int, payload: Any) -> Any:
        values = [payload]
        dist.broadcast_object_list(values, src=speaker, group=self._control.group)
        return values[0]

    @contextmanager
    def _announced(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    # ---- a rank without batches ----------------------------------------------------------------------------

    def answer(self) -> None:
        """Hear what the ranks with work do next, and do it."""
        speaker, text = self._control.first_of("")
        verb, _, rest = text.partition(" ")
        if verb == _CALL:
            payload = self._share(speaker, None)
            with self._announced():
                self._calls[rest](payload)
            return
        engine, *numbers = (int(word) for word in rest.split())
        self._take_part(self._engines[engine], verb, numbers)

    def _take_part(self, engine: Engine, verb: str, numbers: list[int]) -> None:
        if verb == _BEGIN:
            engine.phase_is_backward, engine.sync_backward = True, bool(numbers[0])
            for unit in engine.units:
                unit.reduced = False
        elif verb == _END:
            engine.streams.join()
            engine.in_flight.forget()
            engine.phase_is_backward = False
            settle(engine, engine.units)
        elif verb == Action.REDUCE.value:
            engine.perform(Event(Action.REDUCE, numbers[0]))
        else:
            unit = engine.units[numbers[0]]
            unit.held = False
            unit.release()  # left whole by a forward that had no backward
            engine.coded_as_told = bool(numbers[1])  # this rank is in no forward that could say
            try:
                engine.perform(Event(Action.GATHER, unit.index))
            finally:
                engine.coded_as_told = None
            unit.release()


class _Hook(JoinHook):
    """What torch's `Join` calls on a rank without batches, once for every word of the others."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def main_hook(self) -> None:
        self._seat.answer()


class _Announcing:
    """Stands in for the schedule of one engine: every event is announced, none is recorded or prefetched."""

    joins = True

    def __init__(self, seat: Seat, index: int, engine: Engine) -> None:
        self._seat = seat
        self._index = index
        self._engine = engine
        self._schedule = engine.schedule
        self.phase: Hashable | None = None

    def begin(self, phase: tuple[str, Hashable], depth: int) -> None:
        self.phase = phase
        if phase[0] == "backward":
            self._seat.say(_BEGIN, self._index, int(self._engine.sync_backward))

    def end(self) -> None:
        if isinstance(self.phase, tuple) and self.phase[0] == "backward":
            self._seat.say(_END, self._index)
        self.phase = None

    def need(self, action: Action, unit: Unit) -> None:
        coded = (int(codes_now(self._engine)),) if action is Action.GATHER else ()
        self._seat.say(action.value, self._index, unit.index, *coded)
        self._engine.perform(Event(action, unit.index))

    def passed(self, unit: Unit) -> None:
        """Do nothing: there is no record whose place to keep."""

    def upcoming(self, count: int) -> list[Unit]:
        """Return none, for the same reason."""
        return []

    def abandon(self) -> None:
        self.phase = None

    def forget(self) -> None:
        self._schedule.forget()
