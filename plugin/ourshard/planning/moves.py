"""The words of a rehearsal: what a rank does in a step, and what it sends and holds while it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ourshard.planning.trace import Visit
from ourshard.runtime.ledger import Kind


def ring_nbytes(whole_nbytes: int, ranks: int) -> int:
    """Return what a rank sends in an all-gather, reduce-scatter or all-to-all of `whole_nbytes` over `ranks`.

    Of rings (Thakur et al., 2005), rounded as the runtime's ledger does.
    """
    return whole_nbytes * (ranks - 1) // ranks


def all_reduce_nbytes(nbytes: int, ranks: int) -> int:
    """Return what a rank sends in an all-reduce of `nbytes` over `ranks`."""
    return 2 * nbytes * (ranks - 1) // ranks


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Ranks on each axis of the mesh."""

    shard: int
    replicate: int = 1
    node: int = 1  # neighbours on `shard`; 1 where nothing uses the axis

    @property
    def world(self) -> int:
        return self.shard * self.replicate

    def of(self, axis: str) -> int:
        sizes = {"shard": self.shard, "replicate": self.replicate, "world": self.world}
        return {**sizes, "node": self.node, "cross": self.cross}[axis]

    @property
    def cross(self) -> int:
        return self.shard // self.node if self.node > 1 else 1


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one lane."""

    name: str  # all_gather, reduce_scatter, all_to_all or all_reduce
    axis: str
    whole_nbytes: int  # of the buffer that all ranks together fill or reduce

    def wire_nbytes(self, ranks: int) -> int:
        """Bytes that one rank sends, rounded as the ledger does."""
        ring = all_reduce_nbytes if self.name == "all_reduce" else ring_nbytes
        return ring(self.whole_nbytes, ranks)


class Does(Enum):
    """What a move is."""

    GATHER = "gather"  # start to bring a unit's parameters in, on the gather stream
    REDUCE = "reduce"  # start to reduce a unit's gradients, on the reduce stream
    USE = "use"  # compute waits for the unit's gather
    COMPUTE = "compute"  # a visit of the fake run
    COPY = "copy"  # compute copies `nbytes` (read and written)
    BOUND = "bound"  # compute waits for all but the newest reductions
    JOIN = "join"  # compute waits for everything
    STEP_UNIT = "step unit"  # the optimizer steps `nbytes` of a unit's masters, in backward
    STEP = "step"  # the optimizer steps `nbytes` of masters
    REST = "rest"  # gradients are set to None, the step is over


@dataclass(frozen=True, slots=True)
class Move:
    """One thing that a rank does, and what it holds from then on, in bytes by kind."""

    does: Does
    unit: int
    held: dict[Kind, int]
    in_flight: int = 0  # bytes that the ledger has not: gradients before they are taken, buffers that reductions read
    collectives: tuple[Collective, ...] = ()
    nbytes: int = 0
    visit: Visit | None = None
    host_nbytes: int = 0  # as `nbytes`, but in host memory
    disk_nbytes: int = 0  # of a step, what comes from a disk and goes back, with the state; of a gather, what is read
    behind_nbytes: int = 0  # of a step that the next forward overlaps, as `host_nbytes`; of a gather, up to its unit
    stored_nbytes: int = 0  # shards of parameters that a step writes to a disk
    leaves: int = 0  # parameters whose gradients a reduction takes, one after the other on the host
