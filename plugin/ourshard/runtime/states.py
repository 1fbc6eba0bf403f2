"""What an optimizer keeps one value an element of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.run import Run


@dataclass(frozen=True, slots=True)
class Stream:
    """One value an element of a lane: the master (named ""), or a state of the optimizer."""

    name: str
    dtype: torch.dtype


def states_of(optimizer: Optimizer, run: Run) -> Iterator[tuple[Stream, torch.Tensor]]:
    """Yield the states of a run that have one value an element."""
    for name, value in list(optimizer.state.get(run.parameter, {}).items()):
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == run.parameter.shape:
            yield Stream(name, value.dtype), value


def keep_on_host(optimizer: Optimizer, lane: Lane) -> None:
    """Move states that the optimizer made in its last step, or that were loaded, to the lane's own host memory."""
    for run in lane.runs:
        if run.optimizer() is not optimizer or run.stop == run.start:
            continue
        for stream, value in states_of(optimizer, run):
            place = lane.state_memory(stream)[run.start : run.stop]
            if value.data_ptr() != place.data_ptr():
                optimizer.state[run.parameter][stream.name] = place.copy_(value)
