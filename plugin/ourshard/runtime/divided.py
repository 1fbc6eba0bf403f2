"""Masters and optimizer state cut over shard x replicate, where parameters are cut over `shard` at most.

Note [Divided masters]
----------------------
With `shard_optimizer_over: all` and several replicas, the masters of a trainable lane are cut into one part for each
rank of the world. The parts of a rank and of its counterparts in other replicas make up its segment of the lane, which
is what stage 3 gathers from and what a reduction over `shard` leaves.

* Gradients are reduced over `shard` as ever. What a backward that does not sync leaves is added to a sum of the
  segment, in master dtype (`WaitingSum`). The one that syncs scatters the mean over `replicate`, to each its part.
* The optimizer steps a part.
* After a step the first gather brings the parts of a segment together over `replicate`, in compute dtype; at stage 3
  the segment stays beside the master (`LaneStore.shard`). Gathers over `shard` go on from there.

So a rank sends over `replicate` what an all-reduce would, half of it as weights. Frozen lanes have no optimizer state
and are cut over `shard`, and so is one that is frozen when the model is sharded and trained later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ourshard.config import OptimizerOver, ShardConfig, Tier
from ourshard.runtime.ledger import Kind

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane


def divides_masters(config: ShardConfig, replicas: int) -> bool:
    """Say whether masters are cut over replicas too: Note [Divided masters]."""
    return config.shard_optimizer_over is OptimizerOver.ALL and replicas > 1 and config.stage > 0


def effective_stage(config: ShardConfig, shards: int, replicas: int) -> int:
    """Return the stage that `shards` ranks a copy leave of the one asked for.

    A shard of one rank is the whole, unless it rests below the device, or its master elsewhere: below, or on replicas.
    """
    if shards > 1 or config.offload.params is not Tier.NONE:
        return config.stage
    elsewhere = config.offload.optimizer is not Tier.NONE or divides_masters(config, replicas)
    return min(config.stage, 2) if elsewhere else 0


class WaitingSum:
    """The sum of a lane's segments from backwards that did not sync: Note [Divided masters]."""

    __slots__ = ("_buffer", "_joined", "_lane", "holds")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._joined = lane.layout.joined(lane.layout.world // lane.axis.size)  # cut over `shard` alone
        self._buffer: torch.Tensor | None = None  # on the host, where masters are; taken once there
        self.holds = False  # a sum; else the next segment overwrites it

    def open(self) -> torch.Tensor:
        """Return the buffer, made if need be; on the compute stream, whose allocator owns it."""
        lane, numel = self._lane, self._joined.shard_numel
        if self._buffer is None and lane.offloaded:
            self._buffer = lane.take_host(numel)
        elif self._buffer is None:
            self._buffer = torch.empty(numel, dtype=lane.store_dtype, device=lane.device)
            lane.hold(Kind.GRADIENT, self._buffer)
        return self._buffer

    def add(self, segment: torch.Tensor) -> None:
        """Take a reduced segment in, on the reduce stream."""
        buffer = self.open()
        if not self.holds:
            buffer.copy_(segment, non_blocking=True)
        elif self._lane.offloaded:
            buffer.copy_(self._above(buffer).add_(segment), non_blocking=True)
        else:
            buffer.add_(segment)
        self.holds = True

    def give_to(self, segment: torch.Tensor) -> list[torch.Tensor]:
        """Add the sum to `segment`, and hold none any more; return the buffer, which the reduce stream reads."""
        if not self.holds or self._buffer is None:
            return []
        read = [self._buffer]
        segment.copy_(self._above(self._buffer).add_(segment))
        self.forget()
        return read

    def _above(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(self._lane.device, non_blocking=True)

    def zero(self, position: int) -> None:
        """Set what there is of one parameter to zero, and the padding beside it."""
        if self.holds and self._buffer is not None:
            self._buffer[self._joined.span_on(position, self._lane.axis.rank)].zero_()

    def forget(self) -> None:
        """Hold no sum. Memory of the device is given back."""
        self.holds = False
        if self._buffer is not None and not self._lane.offloaded:
            self._lane.hold(Kind.GRADIENT, self._buffer, -1)
            self._buffer = None
