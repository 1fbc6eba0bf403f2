"""Which units stay whole from their forward to their backward."""

from __future__ import annotations

from collections.abc import Sequence

from ourshard.config import ShardConfig
from ourshard.runtime.layout import UnitLayout
from ourshard.runtime.placement import At
from ourshard.runtime.tiers import lane_key


def kept_whole(layouts: Sequence[UnitLayout], rooted: Sequence[bool], config: ShardConfig) -> list[bool]:
    """Say of each unit, in the order of the model, whether it stays whole for backward; the same on every rank.

    All do without `reshard_after_forward`; with `keep_last` the last ones, whose backward comes first, as long as they
    have no more elements together. Rooted units do anyway.
    """
    kept = [not config.reshard_after_forward] * len(layouts)
    left = config.keep_last if config.stage == 3 else 0
    for index in reversed([index for index, is_rooted in enumerate(rooted) if not is_rooted]):
        left -= _sharded_numel(layouts[index])
        if left < 0:
            break
        kept[index] = True
    return kept


def _sharded_numel(layout: UnitLayout) -> int:
    return sum(lane.numel for lane in layout.lanes if lane_key(lane).placement.params is At.SHARD)
