"""What an optimizer keeps one value an element of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.run import Run


@dataclass(frozen=True, slots=True)
class Column:
    """One value an element of a lane: the master (named ""), or a state of the optimizer."""

    name: str
    dtype: torch.dtype


def states_of(optimizer: Optimizer, run: Run) -> Iterator[tuple[Column, torch.Tensor]]:
    """Yield the states of a run that have one value an element."""
    for name, value in list(optimizer.state.get(run.parameter, {}).items()):
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == run.parameter.shape:
            yield Column(name, value.dtype), value


def problem_of_parts(optimizer: Optimizer, key: Any, value: Any, name: str) -> str | None:
    """Return why a state of a flat part, of which each rank has one, is not the parameter's; None if it is.

    `value`: what has not one value an element; it may be a number of the whole parameter, which all ranks have alike.
    """
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"in a {type(value).__name__}"
    if isinstance(value, torch.Tensor) and value.numel() < 2:
        return None
    if not isinstance(value, torch.Tensor) and not any(tensor.dim() for tensor in _tensors_in(value)):
        return None
    return (
        f"{type(optimizer).__name__} keeps {key!r} {what} for a flat part of {name!r}: that belongs to this rank's "
        "rows alone and can't be saved by name. Use an optimizer whose state has one value an element, or save the "
        "weights alone."
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)


def keep_on_host(optimizer: Optimizer, lane: Lane) -> None:
    """Move states that the optimizer made in its last step, or that were loaded, to the lane's own host memory."""
    for run in lane.runs:
        if run.optimizer() is not optimizer or run.stop == run.start:
            continue
        for column, value in states_of(optimizer, run):
            place = lane.state_memory(column)[run.start : run.stop]
            if value.data_ptr() != place.data_ptr():
                optimizer.state[run.parameter][column.name] = place.copy_(value)
