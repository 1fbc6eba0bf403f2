"""What users do to the leaves that modules show them while no forward runs.

Note [Shown leaves]
-------------------
From a forward with gradients to the end of its backward, if one comes, and inside of `gathered`, modules hold leaves:
who asks them for parameters then gets leaves and not his own. What he does with them is done to his own:
* Optimizers and clipping that are given leaves take `own_of` each.
* After a forward `grad` of a leaf is that of his own parameter (`ShownParameter`): `model.zero_grad()` between forward
  and backward drops what the last step left. When a gradient arrives, leaves have their own `grad` again.
* `requires_grad` that he sets is taken over when the leaves go.
* Elements that he writes in place after a forward are taken over before anything else looks at the masters (inside of
  `gathered`, `writeback` says whether they are). Writes to `.data` of such a leaf can't be seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ourshard.runtime.handle import GET_GRAD, SET_GRAD, ShardParameter
from ourshard.runtime.writing import take_whole, written

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.unit import Unit

_PLACES: Any = WeakIdKeyDictionary()  # by leaf: a reference to its lane, and its position


class Shown(NamedTuple):
    """How the leaves of a unit were when modules began to show them."""

    trained: list[bool]
    versions: list[int]


class ShownParameter(nn.Parameter):
    """A leaf after a forward: its `grad` is that of the user's own parameter."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        own = own_of(self)
        return GET_GRAD(self) if own is self else own.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        own = own_of(self)
        if own is self:
            SET_GRAD(self, value)
        else:
            own.grad = value


@functools.cache
def _shown_class(cls: Any) -> type:
    return type(cls.__name__, (ShownParameter, cls), {"_hidden_class": cls})


def note_leaves(lane: Lane) -> None:
    """Remember whose leaves those of a lane are."""
    for position, leaf in enumerate(lane.leaves):
        _PLACES[leaf] = weakref.ref(lane), position


def own_of(parameter: Any) -> Any:
    """Return the user's own parameter where this one is its leaf; any other as it is."""
    if isinstance(parameter, ShardParameter) or parameter not in _PLACES:
        return parameter
    reference, position = _PLACES[parameter]
    lane = reference()
    return parameter if lane is None else lane.resting[position]


def take_own(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was given leaves have the user's own parameters."""
    for group in optimizer.param_groups:
        for number, given in enumerate(group["params"]):
            own = own_of(given)
            if own is not given:
                group["params"][number] = own
                if given in optimizer.state:
                    optimizer.state[own] = optimizer.state.pop(given)


def show(unit: Unit) -> None:
    """Note how the leaves of a unit are, if they are in place and stay there when no forward runs."""
    if not unit.installed or unit.shown is not None:
        return
    leaves = _leaves(unit)
    unit.shown = Shown([leaf.requires_grad for leaf in leaves], [leaf._version for leaf in leaves])


def show_gradients(units: Iterable[Unit]) -> None:
    """Let leaves that stay in place after a forward have the gradients that the user's own parameters have."""
    for unit in units:
        if unit.installed:
            for own, leaf in _pairs(unit):
                if own.grad is not None and not isinstance(leaf, ShownParameter):
                    leaf.__class__ = _shown_class(leaf.__class__)


def hide_gradients(units: Iterable[Unit]) -> None:
    """Let leaves have their own gradients again."""
    for unit in units:
        for leaf in _leaves(unit):
            leaf.__class__ = getattr(leaf, "_hidden_class", type(leaf))


def take_flags(unit: Unit) -> None:
    """Let the user's own parameters have the `requires_grad` that he set on leaves; the next forward follows it."""
    assert unit.shown is not None
    with torch._C.DisableTorchFunctionSubclass():
        for (own, leaf), trained in zip(_pairs(unit), unit.shown.trained, strict=True):
            if leaf.requires_grad != trained:
                own.requires_grad_(not trained)
                leaf.requires_grad_(trained)
    unit.shown = None


@torch.no_grad()
def take_writes(units: Iterable[Unit]) -> None:
    """Take over what was written to leaves that stayed in place after a forward."""
    for unit in units:
        if unit.shown is None or unit.pinned or unit.shown.versions == [leaf._version for leaf in _leaves(unit)]:
            continue
        lanes = [lane for lane in unit.lanes if not lane.direct]
        for lane in lanes:
            if lane.shows_coded:
                raise RuntimeError(
                    f"Parameters of {unit.label} were written to after a forward, when they are whole as a codec left "
                    "them: write on all ranks inside of `with ourshard.gathered(model, writeback=True):`, outside of a "
                    "forward, or set communication.weights: none."
                )
            take_whole(lane)
        for lane in lanes:
            written(lane)
        if unit.installed:
            unit.uninstall()


def take_shown(units: Iterable[Unit]) -> None:
    """Take over whatever was done to leaves that an earlier forward left in place, before the next one."""
    take_writes(units)
    for unit in units:
        if unit.installed and not unit.pinned:
            unit.uninstall()


def _leaves(unit: Unit) -> list[Any]:
    return [leaf for _, leaf in _pairs(unit)]


def _pairs(unit: Unit) -> list[tuple[Any, Any]]:
    """Return the user's own parameters with their leaves, where the two are not one."""
    lanes = [lane for lane in unit.lanes if not lane.direct]
    return [pair for lane in lanes for pair in zip(lane.resting, lane.leaves, strict=True)]
