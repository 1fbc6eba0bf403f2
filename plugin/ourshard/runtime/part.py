"""Whole values of any module inside of a sharded model, or of some of its names: what saving a part needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from ourshard.runtime.engine import ENGINES, Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.placement import At
from ourshard.runtime.state import check_readable, extra_states, persistent, save_dtype


class _Home(NamedTuple):
    """The lane of a parameter and its position there."""

    lane: Lane
    position: int


def engines_in(module: nn.Module) -> list[Engine]:
    """Return the engines that hold parameters of `module`, in the order in which they were made."""
    homes = _homes()
    found = {homes[id(p)].lane.unit.engine for p in module.parameters() if id(p) in homes}
    return sorted(found, key=lambda engine: engine.order)


def is_here(module: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Return whether this rank has all of `module` whole, as `part_state` saves it: no communication is needed."""
    homes = _homes()
    return all(_lane_is_here(homes[id(p)].lane, dtype) for p in module.parameters() if id(p) in homes)


@torch.no_grad()
def part_state(
    module: nn.Module,
    label: str,
    *,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    keep: bool = True,
) -> dict[str, Any]:
    """Return whole parameters and persistent buffers of `module` on the CPU, by its own names, in its order.

    After them come the extra states of modules.

    Collective over the ranks, unless `is_here`; `label` says to the others what this rank does. Without `keep` a rank
    takes part and gets an empty dict. `names` limits what is gathered. Values come from the masters, in the dtype that
    a parameter was loaded in, or `dtype`. Tied names share one tensor.
    """
    homes = _homes()
    entries = [(name, value) for name, value in persistent(module) if names is None or name in names]
    wanted: dict[Lane, dict[int, None]] = {}
    for _, value in entries:
        if id(value) in homes:
            wanted.setdefault(homes[id(value)].lane, {})[homes[id(value)].position] = None
    for engine in sorted(
        {lane.unit.engine for lane in wanted if not _lane_is_here(lane, dtype)}, key=lambda e: e.order
    ):
        check_readable(engine)
        engine.control.agree(label)
    whole: dict[_Home, torch.Tensor] = {}
    for lane in sorted(wanted, key=lambda lane: (lane.unit.engine.order, lane.unit.index, lane.unit.lanes.index(lane))):
        flat = None if _lane_is_here(lane, dtype) else lane.gather_master()
        for position in wanted[lane] if keep else ():
            found = _present(lane, position) if flat is None else lane.whole_view(flat, position)
            own = lane.parameters[position].dtype
            whole[_Home(lane, position)] = found.detach().to("cpu", dtype=save_dtype(own, dtype), copy=True)
    state: OrderedDict[str, Any] = OrderedDict()  # as torch's
    if not keep:
        return state
    for name, v in entries:
        found = whole[homes[id(v)]] if id(v) in homes else v.detach().to("cpu", _dtype_of(v, homes, dtype), copy=True)
        state[name] = found
    state.update((name, value) for name, value in extra_states(module).items() if names is None or name in names)
    return state


def outline(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return what `part_state` would, without values: tensors on the CPU whose memory nothing has touched."""
    homes = _homes()
    made: dict[object, torch.Tensor] = {}
    found = {}
    for name, value in persistent(module):
        key: object = homes.get(id(value), id(value))
        if key not in made:
            made[key] = torch.empty(tuple(value.shape), dtype=_dtype_of(value, homes, dtype), device="cpu")
        found[name] = made[key]
    return found


def present_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole parameters and persistent buffers of a module that `is_here`, where they are."""
    homes = _homes()
    entries = [(name, value, homes.get(id(value))) for name, value in persistent(module)]
    return {name: value if home is None else _present(*home) for name, value, home in entries}


def _dtype_of(value: torch.Tensor, homes: dict[int, _Home], dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor of a state dict is saved in; buffers keep their own."""
    home = homes.get(id(value))
    own = value.dtype if home is None else home.lane.parameters[home.position].dtype
    return save_dtype(own, dtype) if home is not None or isinstance(value, nn.Parameter) else own


def _homes() -> dict[int, _Home]:
    """Map each tensor that stands for a sharded parameter, at rest or in a forward, to where its values are."""
    return {
        id(tensor): _Home(lane, position)
        for engine in ENGINES
        for lane in engine.lanes()
        for tensors in (lane.resting, lane.leaves)
        for position, tensor in enumerate(tensors)
    }


def _lane_is_here(lane: Lane, dtype: torch.dtype | None) -> bool:
    if lane.placement.whole:
        return True
    # Masters that are rounded to the compute dtype are what is saved in that dtype.
    exact = lane.aliased or {save_dtype(p.dtype, dtype) for p in lane.parameters} == {lane.compute_dtype}
    shows = lane.unit.whole and not lane.stale and not lane.shows_coded
    return lane.placement.params is At.WHOLE and exact and shows


def _present(lane: Lane, position: int) -> torch.Tensor:
    """Return a whole parameter that is on this rank. The user may have moved the tensor he holds: it is the truth."""
    if lane.placement.whole:
        return lane.resting[position]
    lane.unit.finish_gather()
    return lane.whole_view(lane.full.tensor, position)
