"""What the tensors of one lane have in common, and which dtype their master has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ourshard.config import Tier
from ourshard.runtime.placement import At, Placement


@dataclass(frozen=True, slots=True)
class LaneKey:
    """What the tensors of one lane have in common."""

    placement: Placement
    store_dtype: torch.dtype  # of the master
    compute_dtype: torch.dtype
    trainable: bool
    tier: Tier = Tier.NONE  # where the master rests: set for whole layouts, by tiers.py
    coded: bool = False  # travels as blocks of few bits where a codec is set: coded.py, coded_gradients.py

    @property
    def has_own_shard(self) -> bool:
        """Say whether a shard in compute dtype rests beside the master where `offload.params` is not none."""
        if self.placement.params is At.WHOLE or not self.trainable:
            return False
        served = self.tier is Tier.CPU and self.compute_dtype == self.store_dtype  # the master serves
        return self.placement.divided or (self.tier is not Tier.NONE and not served)


def master_dtype_of(own: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of the master of a parameter loaded in `own`.

    It never has less than the parameter had, unless a 16-bit master was asked for by name.
    """
    return torch.promote_types(own, wide) if wide.itemsize > 2 else wide
