"""Bytes on the wire, as formulas: what one rank sends for a lane in one optimizer step, by collective and axis.

The runtime's ledger and the planner's rehearsal are held against them; neither uses them.

Ring algorithms (Thakur et al., 2005): of a buffer of b bytes over n ranks, each rank sends b (n - 1) / n in an
all-gather, reduce-scatter or all-to-all, and twice that in an all-reduce. Keys and rounding are the runtime ledger's.

For a lane of P elements over W ranks in N nodes of n, `nbytes` the size of a coded message:
- stages 0 to 2: 2 b P (W - 1) / W; stage 3: 3 b P (W - 1) / W (Rajbhandari et al., 2020, "ZeRO", section 7).
- quantized weights (qwZ): a gather of nbytes(P) instead of b P.
- secondary shard (hpZ): all gathers of a step but the first run over the s ranks that share it: b P (s - 1) / s, inside
  the node (Note [Secondary shard] in runtime/secondary.py).
- gathers in two hops (MiCS): between nodes b P (N - 1) / (N n), then b P (n - 1) / n in the node, where one hop sends
  b P (W - 1) / W over an axis that leaves the node (Note [Two-hop gathers] in runtime/collectives.py).
- quantized gradients (qgZ): an all-to-all of nbytes(P) in the node, sums in float32, then one of nbytes(P / n) between
  nodes (Wang et al., 2023, "ZeRO++", section 3). Over R replicas an all-to-all of messages and a gather of the coded
  means, of nbytes(P / W) each, the shard padded to whole blocks for each replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ourshard.config import Accumulate
from ourshard.planning.moves import all_reduce_nbytes, ring_nbytes
from ourshard.runtime.codec import BlockCodec
from ourshard.runtime.coded_gradients import replica_part


@dataclass(frozen=True, slots=True)
class Axes:
    """Ranks on each axis. `node` is the part of `shard` that shares a node, `cross` the nodes that `shard` spans."""

    shard: int
    replicate: int = 1
    node: int | None = None

    def __post_init__(self) -> None:
        if self.shard < 1 or self.replicate < 1:
            raise ValueError(f"an axis has at least one rank; got shard={self.shard}, replicate={self.replicate}")
        if self.node is not None and (self.node < 1 or self.shard % self.node):
            raise ValueError(f"node={self.node} does not divide the {self.shard} ranks of the shard axis")

    @property
    def cross(self) -> int:
        return self.shard // (self.node or self.shard)


@dataclass(frozen=True, slots=True)
class Transport:
    """How a lane travels. A codec takes the place of the dtype; lanes of 1-d tensors have none."""

    param_nbytes: int = 2  # bytes of an element of the compute dtype
    grad_nbytes: int = 2  # bytes of an element of the reduce dtype
    weights: BlockCodec | None = None
    gradients: BlockCodec | None = None

    def whole_params(self, numel: int) -> int:
        """Return the bytes of `numel` gathered parameters."""
        return numel * self.param_nbytes if self.weights is None else self.weights.nbytes(numel)

    def whole_grads(self, numel: int) -> int:
        """Return the bytes of `numel` gradients as they are sent for reduction."""
        return numel * self.grad_nbytes if self.gradients is None else self.gradients.nbytes(numel)


@dataclass(frozen=True, slots=True)
class Step:
    """What decides how often a lane moves in one optimizer step."""

    stage: int = 3
    micro_batches: int = 1
    reshard_after_forward: bool = True
    secondary_shard_size: int | None = None
    accumulate: Accumulate = Accumulate.SHARDED
    optimizer_over_all: bool = False  # masters over shard x replicate
    two_hop_gathers: bool = False
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage {self.stage} does not exist; use 0, 1, 2 or 3")
        if self.micro_batches < 1:
            raise ValueError(f"a step has at least one micro-batch; got {self.micro_batches}")
        if self.secondary_shard_size is not None and self.stage != 3:
            raise ValueError(f"a secondary shard needs stage 3; got stage {self.stage}")
        if self.secondary_shard_size is not None and not self.reshard_after_forward:
            raise ValueError("a secondary shard is for gathers in backward; with reshard_after_forward off are none")

    @property
    def gathers(self) -> int:
        """Gathers of stage 3: in every forward, and in every backward where parameters were released."""
        return self.micro_batches * (2 if self.reshard_after_forward else 1)

    @property
    def reductions(self) -> int:
        """Reductions over the shard axis: every backward where gradients are kept in shards, else one."""
        return self.micro_batches if self.stage >= 2 and self.accumulate is Accumulate.SHARDED else 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in `calls` collectives of one kind on one axis."""

    collective: str
    axis: str
    nbytes: int
    calls: int = 1


def lane_traffic(numel: int, axes: Axes, step: Step, transport: Transport) -> list[Traffic]:
    """Return what one rank sends for a lane of `numel` elements (padding counts) in one optimizer step.

    Raises `ValueError` where the lane does not cut into equal shards, or into whole blocks of its codecs.
    """
    _check_lane(numel, axes, step, transport)
    moves = [*_gathers(numel, axes, step, transport), *_reductions(numel, axes, step, transport)]
    return [move for move in moves if move.nbytes]


def total_nbytes(traffic: Iterable[Traffic], axis: str | None = None) -> int:
    """Return the bytes of all collectives, or of those on one axis."""
    return sum(move.nbytes for move in traffic if axis in (None, move.axis))


def by_collective(traffic: Iterable[Traffic]) -> Counter[str]:
    """Return bytes by "collective/axis", the keys of the ledger."""
    counts: Counter[str] = Counter()
    for move in traffic:
        counts[f"{move.collective}/{move.axis}"] += move.nbytes
    return counts


def between_nodes_nbytes(numel: int, axes: Axes, step: Step, transport: Transport) -> int:
    """Return the bytes that a node must receive from other nodes in one step of stage 3, whatever the algorithm.

    This is the count of the ZeRO++ paper: gathers and reductions over N nodes move (N - 1) / N of the whole lane into a
    node. A gather from a secondary shard within the node moves nothing.
    """
    if step.stage != 3:
        raise ValueError(f"the count between nodes is that of stage 3; got stage {step.stage}")
    _check_lane(numel, axes, step, transport)
    nodes = axes.cross
    gathers = step.gathers if step.secondary_shard_size is None else 1
    received = gathers * ring_nbytes(transport.whole_params(numel), nodes)
    return received + step.trainable * step.reductions * ring_nbytes(transport.whole_grads(numel), nodes)


def _gathers(numel: int, axes: Axes, step: Step, transport: Transport) -> Iterator[Traffic]:
    once = list(_gather_hops(transport.whole_params(numel), axes, step))
    if step.stage == 3:
        first = step.gathers if step.secondary_shard_size is None else 1
        yield from (Traffic("all_gather", axis, first * nbytes, first) for axis, nbytes in once)
        if step.secondary_shard_size is not None:  # it holds what the first gather decoded, in the compute dtype
            again, after = ring_nbytes(numel * transport.param_nbytes, step.secondary_shard_size), step.gathers - 1
            yield Traffic("all_gather", "node", after * again, after)
    elif step.stage in (1, 2) and step.trainable:
        yield from (Traffic("all_gather", axis, nbytes) for axis, nbytes in once)
    if step.optimizer_over_all and step.trainable and step.stage > 0:
        shard_nbytes = numel // axes.shard * transport.param_nbytes
        yield Traffic("all_gather", "replicate", ring_nbytes(shard_nbytes, axes.replicate))


def _gather_hops(nbytes: int, axes: Axes, step: Step) -> Iterator[tuple[str, int]]:
    """Yield (axis, bytes) of each hop of a gather of `nbytes`: between nodes and in the node, or one over all."""
    if not step.two_hop_gathers or axes.node is None or axes.cross == 1 or axes.node == 1:
        yield "shard", ring_nbytes(nbytes, axes.shard)
        return
    yield "cross", ring_nbytes(nbytes // axes.node, axes.cross)
    yield "node", ring_nbytes(nbytes, axes.node)


def _reductions(numel: int, axes: Axes, step: Step, transport: Transport) -> Iterator[Traffic]:
    if not step.trainable:
        return
    if step.stage == 0:
        yield Traffic("all_reduce", "shard", all_reduce_nbytes(numel * transport.grad_nbytes, axes.shard))
    elif transport.gradients is None:
        sent = ring_nbytes(numel * transport.grad_nbytes, axes.shard)
        yield Traffic("reduce_scatter", "shard", step.reductions * sent, step.reductions)
    else:
        for axis, nbytes in _coded_hops(numel, axes, transport.gradients):
            yield Traffic("all_to_all", axis, step.reductions * nbytes, step.reductions)
    # Over `replicate` only what this rank keeps travels, once a step.
    kept = (numel if step.stage == 0 else numel // axes.shard) * transport.grad_nbytes
    if step.optimizer_over_all and step.stage > 0 and transport.gradients is not None:
        sent = transport.gradients.nbytes(numel // axes.shard)
        yield Traffic("all_to_all", "replicate", ring_nbytes(sent, axes.replicate))
    elif step.optimizer_over_all and step.stage > 0:
        yield Traffic("reduce_scatter", "replicate", ring_nbytes(kept, axes.replicate))
    elif transport.gradients is None:
        yield Traffic("all_reduce", "replicate", all_reduce_nbytes(kept, axes.replicate))
    else:
        codec = transport.gradients
        padded = replica_part(numel // axes.shard, axes.replicate, codec.block) * axes.replicate
        for name in ("all_to_all", "all_gather"):
            yield Traffic(name, "replicate", ring_nbytes(codec.nbytes(padded), axes.replicate))


def _coded_hops(numel: int, axes: Axes, codec: BlockCodec) -> Iterator[tuple[str, int]]:
    """Yield (axis, bytes) of each hop of a coded reduction: in the node and between nodes, or one over all."""
    if axes.node is None or axes.cross == 1 or axes.node == 1:
        yield "shard", ring_nbytes(codec.nbytes(numel), axes.shard)
        return
    yield "node", ring_nbytes(codec.nbytes(numel), axes.node)
    yield "cross", ring_nbytes(codec.nbytes(numel // axes.node), axes.cross)


def _check_lane(numel: int, axes: Axes, step: Step, transport: Transport) -> None:
    shards = axes.shard * (axes.replicate if step.optimizer_over_all else 1)
    if numel % shards:
        raise ValueError(f"a lane of {numel} elements does not cut into {shards} equal shards")
    for codec in (transport.weights, transport.gradients):
        if codec is not None and numel // axes.shard % codec.block:
            raise ValueError(f"a shard of {numel // axes.shard} elements is not whole blocks of {codec.block}")
    if step.stage == 0 and transport.gradients is not None:
        raise ValueError("coded gradients need shards to be reduced into; stage 0 has none")
    secondary = step.secondary_shard_size
    if secondary is not None and axes.shard % secondary:
        raise ValueError(f"secondary_shard_size={secondary} does not divide the {axes.shard} ranks of the shard axis")
