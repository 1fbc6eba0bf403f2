"""Which lanes a model will have, by the runtime's own planner: no weights, no ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ourshard.config import ShardConfig, Tier
from ourshard.planning.moves import MeshSizes
from ourshard.planning.trace import UnitParts
from ourshard.runtime.casting import dtype_named
from ourshard.runtime.codec import BlockCodec
from ourshard.runtime.coded import weight_codec
from ourshard.runtime.coded_gradients import gradient_codec
from ourshard.runtime.inventory import merge_numel, small_numel, take_stock
from ourshard.runtime.keeping import kept_whole
from ourshard.runtime.lane_plan import LaneRules, plan_lanes
from ourshard.runtime.placement import At, Placement
from ourshard.runtime.tiers import with_tiers


@dataclass(frozen=True, slots=True)
class PlannedLane:
    """A lane by its sizes. Bytes are of one element; see Note [Buffers of a lane] in runtime/lane_store.py."""

    numel: int  # whole lane, padding counted
    shard_numel: int  # of one rank on the shard axis
    used_numel: int  # without padding
    placement: Placement
    trainable: bool
    compute_nbytes: int
    store_nbytes: int
    reduce_nbytes: int
    on_host: bool = False  # the master, or what passes through a step of it: `LaneStore.offloaded`
    on_disk: bool = False  # the master rests in a file, and so does the optimizer's state
    params_tier: Tier = Tier.NONE  # where the shard in compute dtype rests that is beside such a master
    coded_nbytes: int = 0  # of the whole lane as messages of the weights' codec; 0 where it travels as it is
    grad_codec: BlockCodec | None = None  # of reductions, where they are coded
    replicas: int = 1  # over which the master of a shard is cut again: Note [Divided masters]
    secondary_nbytes: int = 0  # of the secondary shard; 0 where there is none

    @property
    def is_coded(self) -> bool:
        """Say whether its gradients travel coded."""
        return self.grad_codec is not None

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
        return not self.sharded and not self.on_host and self.compute_nbytes == self.store_nbytes

    @property
    def full_nbytes(self) -> int:
        return self.numel * self.compute_nbytes

    @property
    def master_numel(self) -> int:
        return self.numel if self.placement.whole else self.shard_numel // self.replicas

    @property
    def has_shard(self) -> bool:
        """Say whether a shard in compute dtype rests beside the master: `LaneStore.shard`."""
        return self.sharded and self.trainable and (self.on_host or self.replicas > 1)

    @property
    def beside_nbytes(self) -> int:
        """Bytes of that shard; none where the master serves: `LaneKey.has_own_shard`."""
        in_memory = self.params_tier is not Tier.NONE and self.on_host and not self.on_disk and self.replicas == 1
        served = in_memory and self.compute_nbytes == self.store_nbytes
        return self.shard_numel * self.compute_nbytes if self.has_shard and not served else 0

    @property
    def read_nbytes(self) -> int:
        """Bytes that a gather reads of a disk: Note [Parameters on a disk] in offload/parameters.py."""
        if not self.trainable:
            return self.master_nbytes if self.on_disk else 0
        return self.beside_nbytes if self.params_tier is Tier.NVME else 0

    @property
    def master_nbytes(self) -> int:
        return self.master_numel * self.store_nbytes


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit by its lanes. `modules` are those whose forwards use it, in order; a rooted unit has none."""

    name: str
    lanes: tuple[PlannedLane, ...]
    modules: tuple[nn.Module, ...] = ()
    parameters: tuple[nn.Parameter, ...] = ()
    rooted: bool = False  # whole from the root's forward to the end of backward
    kept: bool = False  # whole from its forward to its backward

    @property
    def label(self) -> str:
        return self.name or "the root unit"

    @property
    def sharded(self) -> bool:
        return bool(self.sharded_lanes)

    @property
    def sharded_lanes(self) -> list[PlannedLane]:
        return [lane for lane in self.lanes if lane.sharded]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the whole parameters that are let go after use."""
        return sum(lane.full_nbytes for lane in self.sharded_lanes)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The units of a model, the root last."""

    units: tuple[PlannedUnit, ...]
    windows: int = 3  # `offload.windows`

    @property
    def lanes(self) -> tuple[PlannedLane, ...]:
        return tuple(lane for unit in self.units for lane in unit.lanes)

    def parts(self) -> list[UnitParts]:
        """Return what the fake run needs to know of the units."""
        return [UnitParts(unit.modules, unit.parameters if unit.rooted else ()) for unit in self.units]


def plan_model(
    model: nn.Module, config: ShardConfig, mesh: MeshSizes, *, cast_small: bool = False, gpu: bool = False
) -> PlannedModel:
    """Lay out `model` (parameters may be on the meta device) for the ranks of `mesh`.

    `cast_small` is the runtime's: Accelerate's mixed precision leaves small parameters in their own dtype. On a `gpu`
    the runtime merges small units.

    Raises:
        ValueError: a tier that the runtime does not have.
    """
    rules = LaneRules(config, mesh.shard, mesh.replicate, cast_small)
    reduce_dtype = dtype_named(config.precision.reduce_dtype)
    units = []
    small = small_numel(config, mesh.shard, mesh.replicate)
    stock = take_stock(model, config.wrap, merge_numel(config, torch.device("cuda" if gpu else "cpu")), small)
    layouts = with_tiers([plan_lanes(entry.parameters, rules) for entry in stock], config.offload)
    kept = kept_whole(layouts, [entry.rooted for entry in stock], config)
    for entry, layout, stays in zip(stock, layouts, kept, strict=True):
        lanes = tuple(_lane(lane, reduce_dtype, config, mesh, rooted=entry.rooted) for lane in layout.lanes)
        parameters = tuple(parameter.tensor for parameter in entry.parameters)
        units.append(PlannedUnit(entry.name, lanes, tuple(entry.modules), parameters, entry.rooted, stays))
    return PlannedModel(tuple(units), config.offload.windows)


def _lane(
    layout: Any, reduce_dtype: torch.dtype | None, config: ShardConfig, mesh: MeshSizes, *, rooted: bool
) -> PlannedLane:
    key, offload = layout.key, config.offload
    codec, grad_codec = weight_codec(config.communication), gradient_codec(config.communication)
    reduce = reduce_dtype or key.compute_dtype
    shares = None if rooted or key.placement.params is At.WHOLE else config.secondary_shard_size
    return PlannedLane(
        numel=layout.numel,
        shard_numel=layout.numel if key.placement.whole else layout.numel // mesh.shard,
        replicas=mesh.replicate if key.placement.divided else 1,
        used_numel=layout.numel - layout.padding,
        placement=key.placement,
        trainable=key.trainable,
        compute_nbytes=key.compute_dtype.itemsize,
        store_nbytes=key.store_dtype.itemsize,
        reduce_nbytes=reduce.itemsize,
        on_host=key.tier is not Tier.NONE,
        on_disk=key.tier is Tier.NVME,
        params_tier=offload.params,
        coded_nbytes=codec.nbytes(layout.numel) if codec is not None and key.coded else 0,
        grad_codec=grad_codec if key.coded and key.trainable else None,
        secondary_nbytes=layout.numel // shares * key.compute_dtype.itemsize if shares else 0,
    )
