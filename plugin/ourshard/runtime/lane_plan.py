"""Which lanes the parameters of a unit make: where they rest, in which dtypes, and what of them travels coded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from ourshard.config import Codec, ShardConfig
from ourshard.runtime.casting import dtype_named
from ourshard.runtime.coded import can_code
from ourshard.runtime.divided import divides_masters, effective_stage
from ourshard.runtime.inventory import Parameter
from ourshard.runtime.lane_key import LaneKey, master_dtype_of
from ourshard.runtime.layout import LaneLayout, LaneTensor, TensorSpec, UnitLayout, plan_unit
from ourshard.runtime.placement import At, Placement, placement_of


@dataclass(frozen=True, slots=True)
class LaneRules:
    """What decides the lanes beside the parameters themselves; an engine has it, and so has a plan without ranks."""

    config: ShardConfig
    shards: int  # ranks on the axis `shard`
    replicas: int = 1  # and on `replicate`
    cast_small: bool = True  # parameters below `persist_below` compute in `precision.param_dtype`, too

    @property
    def param_dtype(self) -> torch.dtype | None:
        return dtype_named(self.config.precision.param_dtype)

    @property
    def master_dtype(self) -> torch.dtype:
        return dtype_named(self.config.precision.master_dtype) or torch.float32


def plan_lanes(parameters: list[Parameter], rules: LaneRules) -> UnitLayout:
    """Lay the parameters of one unit out: sharded ones over the ranks that have parts, whole ones for one rank."""
    by_world: dict[int, list[int]] = defaultdict(list)
    keys = [_lane_key(parameter, rules) for parameter in parameters]
    for index, key in enumerate(keys):
        replicas = rules.replicas if key.placement.divided else 1
        by_world[1 if key.placement.whole else rules.shards * replicas].append(index)
    lanes: list[LaneLayout] = []
    for world, indices in sorted(by_world.items()):
        specs = [TensorSpec(parameters[i].name, parameters[i].shape, keys[i]) for i in indices]
        block = rules.config.communication.alignment
        for lane in plan_unit(specs, world, align=max(16, block), fine_granules=True).lanes:
            tensors = tuple(LaneTensor(indices[t.index], t.offset, t.numel, t.granule) for t in lane.tensors)
            lanes.append(LaneLayout(lane.key, tensors, lane.shard_numel, lane.world))
    return UnitLayout(tuple(lanes))


def _lane_key(parameter: Parameter, rules: LaneRules) -> LaneKey:
    config, trainable = rules.config, parameter.tensor.requires_grad
    small = parameter.numel < config.persist_below
    stage, over_all = effective_stage(config, rules.shards, rules.replicas), divides_masters(config, rules.replicas)
    placement = placement_of(stage, small=small, trainable=trainable, over_all=over_all)
    compute = store = parameter.dtype
    if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1 and not parameter.packs_codes:
        if rules.param_dtype is not None and (rules.cast_small or not small):
            compute = rules.param_dtype
        if trainable:
            store = master_dtype_of(parameter.dtype, rules.master_dtype)
    coded = _is_coded(parameter, placement, compute, rules)
    return LaneKey(placement, store, compute, trainable, coded=coded)


def _is_coded(parameter: Parameter, placement: Placement, compute: torch.dtype, rules: LaneRules) -> bool:
    """Say whether gathers or reductions of a parameter travel coded: coded.py, coded_gradients.py."""
    communication = rules.config.communication
    gathers = communication.weights is not Codec.NONE and placement.params is At.SHARD
    reduces = communication.gradients is not Codec.NONE and parameter.tensor.requires_grad and not placement.whole
    several = rules.shards > 1 and not parameter.packs_codes
    return (gathers or reduces) and several and can_code(parameter.shape, compute)
