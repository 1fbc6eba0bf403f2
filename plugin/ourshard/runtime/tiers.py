"""Which tier the master of each lane rests on.

Note [Part of the masters]
--------------------------
With an `offload.optimizer_ratio` below 1 some lanes keep master, gradient and state on the device, as without offload,
and step there while the CPU steps the others. Lanes are not cut for it: those that leave are chosen from the longest
to the shortest, as long as no more than the ratio of all elements leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ourshard.config import OffloadConfig, Tier
from ourshard.runtime.disk import DiskNeed, padded
from ourshard.runtime.host_room import HostNeed
from ourshard.runtime.lane_key import LaneKey
from ourshard.runtime.layout import LaneLayout, UnitLayout


def with_tiers(layouts: Sequence[UnitLayout], offload: OffloadConfig) -> list[UnitLayout]:
    """Return the layouts of all units with the tier of each lane in its key; the same on every rank."""
    stepped = [lane for unit in layouts for lane in unit.lanes if _is_shard(lane) and lane_key(lane).trainable]
    leaving = _part(stepped, offload.optimizer_ratio)

    def tier_of(lane: LaneLayout) -> Tier:
        if not _is_shard(lane):
            return Tier.NONE
        if not lane_key(lane).trainable:
            return offload.params
        return offload.optimizer if id(lane) in leaving else Tier.NONE

    return [
        UnitLayout(tuple(replace(lane, key=replace(lane_key(lane), tier=tier_of(lane))) for lane in unit.lanes))
        for unit in layouts
    ]


def _part(lanes: Sequence[LaneLayout], ratio: float) -> set[int]:
    """Return the ids of the lanes that leave: Note [Part of the masters]."""
    left = ratio * sum(lane.numel for lane in lanes)
    leaving = set()
    for lane in sorted(lanes, key=lambda lane: -lane.numel):
        if lane.numel <= left:
            left -= lane.numel
            leaving.add(id(lane))
    return leaving


def disk_need(layouts: Sequence[UnitLayout], offload: OffloadConfig, shards: int) -> DiskNeed:
    """Return what one of `shards` ranks of the shard axis keeps on a disk."""
    masters = parameters = tensors = 0
    for lane in (lane for unit in layouts for lane in unit.lanes if _is_shard(lane)):
        key = lane_key(lane)
        if key.trainable and key.tier is Tier.NVME:
            masters += lane.shard_numel * key.store_dtype.itemsize
            tensors += 1
        if not key.trainable and key.tier is Tier.NVME:
            parameters += lane.shard_numel * key.store_dtype.itemsize
            tensors += 1
        if key.trainable and offload.params is Tier.NVME and key.has_own_shard:
            parameters += lane.numel // shards * key.compute_dtype.itemsize
            tensors += 1
    return DiskNeed(masters, parameters, tensors)


def host_need(layouts: Sequence[UnitLayout], offload: OffloadConfig, shards: int) -> HostNeed:
    """Return what one of `shards` ranks of the shard axis takes of the host: Note [Masters on the host] in host.py."""
    nbytes = states = 0
    masters: list[int] = []  # that pass through windows
    parameters: list[int] = []
    for lane in (lane for unit in layouts for lane in unit.lanes if _is_shard(lane)):
        key = lane_key(lane)
        master = lane.shard_numel * key.store_dtype.itemsize
        if key.trainable and key.tier is not Tier.NONE:
            nbytes += master  # the gradient
        if key.tier is Tier.CPU:
            nbytes += master
            states += 2 * master * key.trainable
        elif key.tier is Tier.NVME:
            (masters if key.trainable else parameters).append(padded(master))
        if key.trainable and key.has_own_shard and offload.params is not Tier.NONE:
            shard = lane.numel // shards * key.compute_dtype.itemsize
            nbytes += shard * (offload.params is Tier.CPU)
            parameters += [padded(shard)] * (offload.params is Tier.NVME)
    nbytes += min(offload.windows, len(parameters)) * max(parameters, default=0)
    windows = min(offload.windows, len(masters)) * 3 * max(masters, default=0)
    return HostNeed(nbytes, nbytes + states + windows)


def _is_shard(lane: LaneLayout) -> bool:
    return not lane_key(lane).placement.whole


def lane_key(lane: LaneLayout) -> LaneKey:
    """Return the key of a lane of a model, whose layout knows it as any key."""
    assert isinstance(lane.key, LaneKey)
    return lane.key
