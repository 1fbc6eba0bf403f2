"""Norms and clipping over sharded, whole, tied and frozen parameters."""

from __future__ import annotations

import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ourshard.runtime.engine import ENGINES, Engine
from ourshard.runtime.handle import ShardParameter
from ourshard.runtime.in_backward import refuse_clipping, refuse_part_of
from ourshard.runtime.lane import Lane
from ourshard.runtime.mesh import Axis
from ourshard.runtime.norms import norms_of, ordered_bits
from ourshard.runtime.settling import bring_in_waiting
from ourshard.runtime.shown import ShownParameter, own_of

_before_clipping: OrderedDict[int, Callable[[], None]] = OrderedDict()


def register_clip_pre_hook(look: Callable[[], None]) -> RemovableHandle:
    """Call `look` in each `clip_grad_norm_`, before it changes anything; it may raise, then on all ranks.

    Once a norm is not finite, clipping makes every gradient so. Returns a handle with `remove()`.
    """
    handle = RemovableHandle(_before_clipping)
    _before_clipping[handle.id] = look
    return handle


@dataclass(slots=True)
class _Gradients:
    """Local gradients to look at: `sharded` (this rank's rows) by engine and axis, `whole` the same on all ranks."""

    sharded: dict[tuple[Engine, Axis], list[torch.Tensor]] = field(default_factory=dict)
    whole: list[torch.Tensor] = field(default_factory=list)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)  # by id of a tensor, where known: of order 2, of parts
    lanes: dict[int, Lane] = field(default_factory=dict)  # by id of a tensor that is the whole gradient of one
    dtype: torch.dtype = torch.float32  # of their norm; the same on a rank that holds no rows

    def all(self) -> list[torch.Tensor]:
        return [*self.whole, *(tensor for tensors in self.sharded.values() for tensor in tensors)]


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the norm of the gradients of `parameters` (or of a model), as `torch.nn.utils.clip_grad_norm_` does.

    Returns the norm before clipping, a 0-d tensor that is the same on every rank. Collective: call it on all
    ranks. Each element counts once, whichever ranks hold it. With `optimizer_in_backward` an infinite `max_norm` gives
    the norm, and others raise `RuntimeError`.
    """
    gradients = _collect(parameters, changes=max_norm != math.inf or norm_type != 2)
    for look in tuple(_before_clipping.values()):
        look()
    norm = _total_norm(gradients, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"The gradient norm of order {norm_type} is {norm.item()}; nothing was clipped.")
    _divide(gradients, torch.clamp((norm + 1e-6) / max_norm, min=1.0))
    return norm


def _divide(gradients: _Gradients, divisor: torch.Tensor) -> None:
    """Divide all gradients, with their step where that can be: Note [Late division] in gradient_notes.py."""
    lanes = gradients.lanes
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in gradients.all():
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        here = divisor.to(device)
        if device.type == "cpu" and here.item() == 1.0:  # a pass over all gradients takes long there
            continue
        rest = [each for each in group if id(each) not in lanes or not lanes[id(each)].notes.ask(each, here)]
        if rest:
            torch._foreach_div_(rest, here)


def clip_grad_value_(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp each gradient element to [-clip_value, clip_value]; local, no communication."""
    for tensor in _collect(parameters, changes=True).all():
        tensor.clamp_(-clip_value, clip_value)


def _collect(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, changes: bool) -> _Gradients:
    """Return the gradients; unless it `changes` them, by a norm alone those that the last backward has stepped."""
    if isinstance(parameters, nn.Module):
        asked = _asked_of(parameters)
    else:
        asked = _Asked([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    if changes:
        refuse_clipping(asked.by_lane)
    for engine in [engine for engine in ENGINES if engine.unsynced]:
        if asked.has_some_of(engine):
            bring_in_waiting(engine)
    found = _Gradients()
    found.whole.extend(p.grad for p in asked.others if p.grad is not None)
    for lane, positions in asked.by_lane.items():
        _add_lane(lane, positions, found)
    for dtype in {lane.store_dtype for lane in asked.by_lane} | {tensor.dtype for tensor in found.whole}:
        found.dtype = torch.promote_types(found.dtype, dtype.to_real())
    return found


class _Asked:
    """The parameters that are asked for: positions by lane, and those of no lane."""

    __slots__ = ("by_lane", "others")

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.by_lane: dict[Lane, set[int]] = {}
        self.others: list[torch.Tensor] = []
        own = map(_with_gradient, parameters)
        for parameter in {id(parameter): parameter for parameter in own}.values():
            if isinstance(parameter, ShardParameter):
                self.by_lane.setdefault(parameter._lane, set()).add(parameter._position)
            else:
                self.others.append(parameter)

    def has_some_of(self, engine: Engine) -> bool:
        others = set(map(id, self.others))
        return any(lane in self.by_lane or not others.isdisjoint(map(id, lane.resting)) for lane in engine.lanes())


def _with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the user's own parameter for a leaf that was asked for: Note [Shown leaves] in shown.py."""
    if isinstance(parameter, ShardParameter):
        return parameter
    if not isinstance(parameter, ShownParameter) and (parameter.grad is not None or not parameter.requires_grad):
        return parameter  # needs no search, which takes the host 1 us
    found: torch.Tensor = own_of(parameter)
    return found


class _AskedOfModel(_Asked):
    """The parameters of a model, which are looked for again once it has other modules or parameters.

    Looking for those of 48 layers takes the host 1.2 ms, and a look at what it has 0.2.
    """

    __slots__ = ("_adoption", "_entries", "_registries")

    def __init__(self, model: nn.Module, adoption: int) -> None:
        super().__init__(model.parameters())
        self._adoption = adoption
        self._registries: list[dict[str, Any]] = [
            registry for m in model.modules() for registry in (m._parameters, m._modules)
        ]
        self._entries = self._look()

    def holds(self, adoption: int) -> bool:
        now = self._look()
        same = adoption == self._adoption and len(now) == len(self._entries)
        return same and all(map(operator.is_, now, self._entries))

    def _look(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._registries)))


def _asked_of(model: nn.Module) -> _Asked:
    engine = model.__dict__.get("_ourshard")
    if not isinstance(engine, Engine):
        return _Asked(model.parameters())
    if not isinstance(engine.clipped, _AskedOfModel) or not engine.clipped.holds(engine.adoption):
        engine.clipped = _AskedOfModel(model, engine.adoption)
    return engine.clipped


def _add_lane(lane: Lane, positions: set[int], found: _Gradients) -> None:
    mine = found.sharded.setdefault((lane.unit.engine, lane.spread), [])
    lane.forget_released()
    if lane.spent_norm is not None:
        if len(positions) < len(lane.parameters):
            refuse_part_of(lane)
        mine.append(lane.spent_norm)
        found.norms[id(lane.spent_norm)] = lane.spent_norm
        return
    lane.erase_dropped()
    gradient = lane.gradient
    if gradient is None or not lane.accumulated:
        return
    valid = [position for position in sorted(positions) if lane.valid[position]]
    if not valid:
        return
    if len(valid) == lane.valid.count(True):
        mine.append(gradient)  # all that has a gradient is asked for: the flat lane, padding is zero
        found.lanes[id(gradient)] = lane
        norms = lane.norms_of(gradient)
        if norms is not None:
            found.norms[id(gradient)] = norms
    else:
        mine.extend(lane.rows_view(gradient, position) for position in valid if lane.rows(position).rows)


def _total_norm(gradients: _Gradients, order: float) -> torch.Tensor:
    dtype, norms = gradients.dtype, gradients.norms if order == 2.0 else {}
    parts = [_local(gradients.whole, order, None, dtype, {})] if gradients.whole else []
    for (engine, axis), tensors in gradients.sharded.items():
        local = _local(tensors, order, engine.mesh.device, dtype, norms).to(engine.mesh.device)
        if math.isinf(order):
            sent, op = ordered_bits(local), torch.distributed.ReduceOp.MAX
        else:
            sent, op = local, torch.distributed.ReduceOp.SUM
        engine.collectives.all_reduce(sent, axis, "the gradient norm", op)
        parts.append(local)
    if not parts:
        return torch.tensor(0.0, device="cpu")
    stacked = torch.stack([part.to(parts[-1].device) for part in parts])
    return stacked.max() if math.isinf(order) else stacked.sum() ** (1.0 / order)


def _local(
    tensors: list[torch.Tensor],
    order: float,
    device: torch.device | None,
    dtype: torch.dtype,
    known: dict[int, torch.Tensor],
) -> torch.Tensor:
    """Return the sum of |g|^order (the largest |g| for an infinite order) of local tensors, in `dtype`.

    `known` has, by id, norms of parts of some, which are read in their place: Note [Known norms] in norms.py.
    """
    if not tensors:
        return torch.zeros((), device=device, dtype=dtype)
    found = norms_of([known.get(id(tensor), tensor) for tensor in tensors], order)
    where = device or found[0].device
    if len({(norm.device, norm.dtype) for norm in found}) > 1:
        found = [norm.to(where, dtype) for norm in found]
    norms = torch.stack(found).to(where, dtype)
    return norms.max() if math.isinf(order) else (norms**order).sum()
