"""A stage is a placement, not a code path.

Three facts say all that a stage means: where whole parameters, gradients and masters are at rest. They are
decided once; the rest of the runtime only asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class At(Enum):
    """What a rank holds at rest."""

    WHOLE = "whole"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parameters, gradients and masters of a lane are at rest."""

    params: At
    grads: At
    master: At

    def __post_init__(self) -> None:
        order = (self.params, self.grads, self.master)
        assert all(not (a is At.SHARD and b is At.WHOLE) for a, b in pairwise(order)), order

    @property
    def whole(self) -> bool:
        """Say whether everything is whole, as under DDP."""
        return self.master is At.WHOLE


WHOLE = Placement(At.WHOLE, At.WHOLE, At.WHOLE)

_BY_STAGE = {
    0: WHOLE,
    1: Placement(At.WHOLE, At.WHOLE, At.SHARD),
    2: Placement(At.WHOLE, At.SHARD, At.SHARD),
    3: Placement(At.SHARD, At.SHARD, At.SHARD),
}


def placement_of(stage: int, *, small: bool = False, trainable: bool = True) -> Placement:
    """Return the placement of a lane.

    Small parameters stay whole at every stage. Frozen ones have neither gradient nor master: they are whole
    up to stage 2.
    """
    if small or (not trainable and stage < 3):
        return WHOLE
    return _BY_STAGE[stage]
