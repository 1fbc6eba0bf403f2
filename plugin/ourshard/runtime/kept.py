"""What is still held of whole parameters when the block of `gathered` ends.

Note [Kept after gathered]
--------------------------
The memory of a unit goes when the block ends, and comes back into the same storage: Note [Stable storage]. A tensor on
it that is read in between would read what is not there, and the process would die.

* Whole parameters that the user holds are the leaves, of which there are more references than before the block. While
  their memory is gone, and there are, their class is `ClosedParameter`, which answers questions about shape, dtype and
  gradient, and raises for all that reads values.
* Views (`detach()`, `.data`, `p[0]`, a `state_dict()`) are plain tensors. Where there are tensors on the slot that the
  engine did not make, the lane takes another slot, and the memory stays theirs, with its values, until all are gone.
  A graph of a forward inside of the block counts as such a view: its backward then reads what that forward read.
* A graph of what was computed with a whole parameter itself may have saved the leaf. That leaf shows the memory that is
  left whenever the unit is at rest, until the graph is gone. The graph leads to the leaf past all hooks on modules: the
  gradient begins a backward of the model, which reduces it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ourshard.runtime.handle import GET_GRAD, SET_DATA, SET_GRAD, Resting
from ourshard.runtime.lane_store import uses_of

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.unit import Unit

_T = torch.Tensor
_OF_THE_LEAF = {GET_GRAD, SET_GRAD, SET_DATA, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__}
_TEXTS = {_T.__repr__, _T.__format__}


class ClosedParameter(Resting, nn.Parameter):
    """A whole parameter whose memory is gone: Note [Kept after gathered]."""

    _open_class: type[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_THE_LEAF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return repr(self) if func in _TEXTS else super()._called(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self._lane.name_of(self._position)
        return f"ClosedParameter({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _advice(self, verb: str) -> str:
        return (
            f"{self._lane.name_of(self._position)!r} was taken inside of `with ourshard.gathered(...)` and is read "
            f"after the block, when it is whole no more: {verb} is not possible. Read it inside of the block, or "
            "`.clone()` there what is to be read later."
        )


class Taken(NamedTuple):
    """A leaf that the user holds, and how many references to it are ours."""

    lane: Lane
    position: int
    references: int

    @property
    def is_held(self) -> bool:
        """Say whether the user, or a graph, holds it."""
        return _references(self.lane, self.position) > self.references


def count_references(units: Sequence[Unit]) -> list[Taken]:
    """Count the references to the leaves of units at rest, before users can take any."""
    known = {(taken.lane, taken.position): taken.references for unit in units for taken in unit.taken}
    places = [(lane, position) for unit in units for lane in unit.freed for position in range(len(lane.leaves))]
    return [Taken(*place, known.get(place) or _references(*place)) for place in places]


def _references(lane: Lane, position: int) -> int:
    return sys.getrefcount(lane.leaves[position])


def count_uses(units: Sequence[Unit]) -> dict[Lane, list[int]]:
    """Count what refers to the leaves of units besides Python, before users compute with them."""
    return {lane: [uses_of(leaf) for leaf in lane.leaves] for unit in units for lane in unit.freed}


def leave_views(unit: Unit, uses: Mapping[Lane, Sequence[int]]) -> None:
    """Leave the memory of a unit that is to be released to those who have tensors on it; `uses`: of before."""
    for lane in unit.freed:
        before = enumerate(zip(lane.leaves, uses[lane], strict=True))
        saved = {position: count for position, (leaf, count) in before if uses_of(leaf) > count}
        if saved or lane.full.has_others:
            lane.leave_full(saved)


def hear_of_gradients(engine: Engine, units: Sequence[Unit]) -> None:
    """Begin a backward where a gradient comes to a whole parameter of units after the block, by a graph made in it."""
    begin = partial(_begin_backward, weakref.ref(engine), engine.require_sync)
    for leaf in [leaf for unit in units for lane in unit.lanes for leaf in lane.leaves]:
        if leaf.requires_grad and torch.is_grad_enabled():
            get_gradient_edge(leaf).node.register_prehook(begin)  # gone with the last graph that leads there


def _begin_backward(reference: weakref.ref[Engine], sync: bool, _: Any) -> None:
    engine = reference()
    if engine is not None and not engine.phase_is_backward and not engine.gathered_depth:
        engine.sync_backward = sync
        engine.begin_backward()


def note_taken(counted: Sequence[Taken]) -> None:
    """Close the leaves that were taken, of units that are at rest again."""
    for taken in counted:
        unit = taken.lane.unit
        if not unit.whole and taken.is_held and not isinstance(taken.lane.leaves[taken.position], ClosedParameter):
            unit.taken = [*unit.taken, taken]
            close(unit)


def close(unit: Unit) -> None:
    """Close the leaves of a unit that the user holds: their memory is gone."""
    for lane, position, _ in unit.taken:
        leaf: Any = lane.leaves[position]
        if not isinstance(leaf, ClosedParameter):
            leaf._open_class, leaf._lane, leaf._position = type(leaf), lane, position
            leaf.__class__ = ClosedParameter


def reopen(unit: Unit) -> None:
    """Let the leaves of a unit, whose memory is back, be parameters again; forget those that nobody holds."""
    for lane, position, _ in unit.taken:
        _open(lane.leaves[position])
    unit.taken = [taken for taken in unit.taken if taken.is_held]  # while a graph is there, it counts as held


def _open(leaf: Any) -> None:
    if hasattr(leaf, "_open_class"):
        leaf.__class__ = leaf._open_class
        del leaf._open_class, leaf._lane, leaf._position
