"""Which lanes a model will have, by the runtime's own planner: no weights, no ranks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ourshard.config import ShardConfig
from ourshard.runtime.build import plan_lanes
from ourshard.runtime.inventory import take_stock
from ourshard.runtime.placement import At, Placement


@dataclass(frozen=True, slots=True)
class PlannedLane:
    """A lane by its sizes. Bytes are of one element; see Note [Buffers of a lane] in runtime/lane.py."""

    numel: int  # whole lane, padding counted
    shard_numel: int
    used_numel: int  # without padding
    placement: Placement
    trainable: bool
    compute_nbytes: int
    store_nbytes: int
    reduce_nbytes: int

    @property
    def sharded(self) -> bool:
        return self.placement.params is At.SHARD

    @property
    def direct(self) -> bool:
        """Say whether what the user holds is master and leaf at once, as under DDP."""
        return self.placement.whole and self.compute_nbytes == self.store_nbytes

    @property
    def aliased(self) -> bool:
        """Say whether the master is a part of the whole parameters, not a copy."""
        return not self.sharded and self.compute_nbytes == self.store_nbytes

    @property
    def full_nbytes(self) -> int:
        return self.numel * self.compute_nbytes

    @property
    def master_numel(self) -> int:
        return self.numel if self.placement.master is At.WHOLE else self.shard_numel

    @property
    def master_nbytes(self) -> int:
        return self.master_numel * self.store_nbytes


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit by its lanes."""

    name: str
    lanes: tuple[PlannedLane, ...]

    @property
    def label(self) -> str:
        return self.name or "the root unit"

    @property
    def sharded(self) -> bool:
        return any(lane.sharded for lane in self.lanes)

    @property
    def trainable(self) -> bool:
        return any(lane.trainable for lane in self.lanes)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the whole parameters that are let go after use."""
        return sum(lane.full_nbytes for lane in self.lanes if lane.sharded)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The units of a model, the root last, and the modules that they are."""

    units: tuple[PlannedUnit, ...]
    modules: tuple[nn.Module, ...]  # without the root

    @property
    def lanes(self) -> tuple[PlannedLane, ...]:
        return tuple(lane for unit in self.units for lane in unit.lanes)

    @property
    def numel(self) -> int:
        return sum(lane.used_numel for lane in self.lanes)


def plan_model(model: nn.Module, config: ShardConfig, shard_ranks: int, *, cast_small: bool = False) -> PlannedModel:
    """Lay out `model` (parameters may be on the meta device) for `shard_ranks` ranks on the shard axis.

    `cast_small` is the runtime's: Accelerate's mixed precision leaves small parameters in their own dtype.
    """
    settings: Any = SimpleNamespace(
        config=config,
        mesh=SimpleNamespace(shard=SimpleNamespace(size=shard_ranks)),
        param_dtype=_dtype(config.precision.param_dtype),
        master_dtype=_dtype(config.precision.master_dtype) or torch.float32,
        cast_small=cast_small,
    )
    reduce_dtype = _dtype(config.precision.reduce_dtype)
    stock = take_stock(model, config.wrap)
    units = []
    for entry in stock:
        lanes = tuple(_lane(lane, reduce_dtype) for lane in plan_lanes(entry.parameters, settings).lanes)
        units.append(PlannedUnit(entry.name, lanes))
    return PlannedModel(tuple(units), tuple(module for entry in stock for module in entry.modules))


def _lane(layout: Any, reduce_dtype: torch.dtype | None) -> PlannedLane:
    key = layout.key
    reduce = reduce_dtype or key.compute_dtype
    return PlannedLane(
        numel=layout.numel,
        shard_numel=layout.shard_numel,
        used_numel=layout.numel - layout.padding,
        placement=key.placement,
        trainable=key.trainable,
        compute_nbytes=key.compute_dtype.itemsize,
        store_nbytes=key.store_dtype.itemsize,
        reduce_nbytes=reduce.itemsize,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None
