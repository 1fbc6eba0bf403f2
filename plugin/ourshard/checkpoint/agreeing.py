"""What all ranks of a save or a load do together: where one fails, all do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ourshard.runtime.engine import Engine

from .source import CheckpointError, DiskError


@contextmanager
def together(engine: Engine, label: str, alike: str = "") -> Iterator[None]:
    """Run the body on all ranks; where it fails on one, fail on all. Collective; no collective inside.

    `alike`: what else has to be the same on all ranks.
    """
    engine.control.agree(label + alike)  # who is elsewhere is noticed here, in seconds
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    told = None
    if error is not None:
        told = Failure.of(error, label)
    try:
        engine.control.meet(label)  # the slowest disk may take longer than a collective may wait
        failures = engine.control.gather_objects(told, label)
    except Exception as problem:  # the ranks may also be elsewhere, waiting for this one
        if error is not None:
            raise error from problem
        raise
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if isinstance(failure, Failure):
            raise failure.on(rank, "found on").error()


class Failure(NamedTuple):
    """What a rank tells the others."""

    text: str
    of_disk: bool

    @classmethod
    def of(cls, error: Exception, label: str) -> Failure:
        """Tell of an error in what `label` says."""
        return cls(f"{label}: {type(error).__name__}: {error}", isinstance(error, OSError))

    def on(self, rank: int, how: str) -> Failure:
        """Say where it was."""
        return self._replace(text=f"{self.text} ({how} rank {rank})")

    def error(self) -> CheckpointError:
        """Return what to raise."""
        return (DiskError if self.of_disk else CheckpointError)(self.text)
