"""A stage is a placement, not a code path.

Three facts say all that a stage means: where whole parameters, gradients and masters are at rest. They are
decided once; the rest of the runtime only asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise


class At(Enum):
    """What a rank holds at rest."""

    WHOLE = "whole"
    SHARD = "shard"  # one part of what is cut over the shard axis
    WORLD_SHARD = "world shard"  # masters only: one part of what is cut over shard x replicate


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parameters, gradients and masters of a lane are at rest."""

    params: At
    grads: At
    master: At
    whole: bool = field(init=False, compare=False)  # everything is, as under DDP
    divided: bool = field(init=False, compare=False)  # masters are cut over replicas too: Note [Divided masters]

    def __post_init__(self) -> None:
        order = [list(At).index(at) for at in (self.params, self.grads, self.master)]
        assert all(a <= b for a, b in pairwise(order)), self
        object.__setattr__(self, "whole", self.master is At.WHOLE)
        object.__setattr__(self, "divided", self.master is At.WORLD_SHARD)


WHOLE = Placement(At.WHOLE, At.WHOLE, At.WHOLE)

_BY_STAGE = {
    0: WHOLE,
    1: Placement(At.WHOLE, At.WHOLE, At.SHARD),
    2: Placement(At.WHOLE, At.SHARD, At.SHARD),
    3: Placement(At.SHARD, At.SHARD, At.SHARD),
}


def placement_of(stage: int, *, small: bool = False, trainable: bool = True, over_all: bool = False) -> Placement:
    """Return the placement of a lane.

    Small parameters stay whole at every stage. Frozen ones have neither gradient nor master: they are whole
    up to stage 2. With `over_all` the masters of trainable ones are cut over replicas too.
    """
    if small or (not trainable and stage < 3):
        return WHOLE
    placement = _BY_STAGE[stage]
    if over_all and trainable and not placement.whole:
        return replace(placement, master=At.WORLD_SHARD)
    return placement
