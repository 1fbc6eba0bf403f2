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


def is_laid_out(value: Any, numel: int) -> bool:
    """Say whether state of `numel` flat elements has a meaning with others alone: scales of blocks, codes, tables.

    That is what has neither one value for each element nor one for all; one byte for each, which is a code; and tensors
    of a class that stands for others.
    """
    if stands_for_others(value):
        return True
    if not isinstance(value, torch.Tensor) or value.numel() < 2:
        return False
    return tuple(value.shape) != (numel,) or (value.dtype.itemsize == 1 and value.dtype != torch.bool)


def stands_for_others(value: Any) -> bool:
    """Say whether a tensor is of a class that keeps its values in others, by torch's protocol, as those of torchao."""
    return isinstance(value, torch.Tensor) and hasattr(type(value), "__tensor_flatten__")


def problem_of_nested(optimizer: Optimizer, key: Any, value: Any, name: str) -> str | None:
    """Return why state of a flat part, of which each rank has one, can't be saved: it is in a list or dict; else None.

    A number of the whole parameter, which all ranks have alike, may be in one.
    """
    if isinstance(value, torch.Tensor) or not is_of_elements(value):
        return None
    return (
        f"{type(optimizer).__name__} keeps {key!r} in a {type(value).__name__} for a flat part of {name!r}: that "
        "belongs to this rank's rows alone and can't be saved by name. Use an optimizer that keeps its tensors in the "
        "state itself, or save the weights alone."
    )


def problem_of_class(optimizer: Optimizer, key: Any, value: Any, name: str) -> str | None:
    """Return why state of a parameter that is stepped whole can't be saved: its class stands for others; else None."""
    if not stands_for_others(value):
        return None
    return (
        f"{type(optimizer).__name__} keeps {key!r} of {name!r}, which is stepped whole, in a {type(value).__name__}: "
        "no checkpoint by rows has that. Use checkpoint.format: full; or several ranks and stage 1 to 3, without "
        "`elementwise = False`; or an optimizer of 8 bits that keeps plain tensors, as those of bitsandbytes."
    )


def refuse_to_cut(optimizer: Optimizer, key: Any, value: Any, numel: int, *, why: str) -> None:
    """Raise ValueError if state of `numel` flat elements can't be cut where they are. `why` they are, with names."""
    nested = not isinstance(value, torch.Tensor) and is_of_elements(value)
    if nested or is_laid_out(value, numel):
        kind = type(optimizer).__name__
        apart = f" Or let one rank step each parameter whole: set `{kind}.elementwise = False` before `prepare`."
        raise ValueError(
            f"{kind} keeps {key!r} in a layout of its own, which can't be cut, but {why}."
            f"{'' if stands_for_others(value) else apart}"
        )


def is_of_elements(value: Any) -> bool:
    """Say whether there is a tensor of more than one value in what an optimizer keeps."""
    return any(tensor.numel() > 1 for tensor in _tensors_in(value))


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
