"""Backwards inside of a forward: forces that a model takes from its energy, slopes that it is given as inputs.

Note [Backwards inside of a forward]
------------------------------------
To the schedule a forward and a backward are phases, each with a record. Where a backward begins inside of the root's
forward, on all ranks, the forward's phase ends; what is left of it is another phase, with a record of its own. What the
forward holds stays whole until the forward is over. Such a backward does not sync: the one of the loss does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from ourshard.runtime.wording import counted

if TYPE_CHECKING:
    from ourshard.runtime.schedule import Schedule


class _Rest(NamedTuple):
    """What is left of a forward after backwards inside of it."""

    title: Hashable
    backwards: int

    def __str__(self) -> str:
        return f"{self.title}, after {counted(self.backwards, 'backward')} inside of it"


class LeftForward:
    """The forward of a model that a backward is inside of, if it is in one."""

    def __init__(self) -> None:
        self._inside = False
        self._phase: tuple[str, Hashable] | None = None  # of the forward, where it gathers

    def __bool__(self) -> bool:
        return self._inside

    def leave(self, schedule: Schedule, *, inside: bool) -> None:
        """Note that a backward begins, `inside` of a forward or not, and end the phase of that forward."""
        self._inside, self._phase = inside, schedule.phase
        if self._phase is not None:
            schedule.end()

    def resume(self, schedule: Schedule, depth: int) -> None:
        """Begin the phase of what is left of that forward, as the backward ends; `depth` units are gathered ahead."""
        phase = self._phase
        self.forget()
        if phase is not None:
            kind, title = phase
            done = title if isinstance(title, _Rest) else _Rest(title, 0)
            schedule.begin((kind, done._replace(backwards=done.backwards + 1)), depth)

    def forget(self) -> None:
        """Forget it, after an exception too."""
        self._inside, self._phase = False, None
