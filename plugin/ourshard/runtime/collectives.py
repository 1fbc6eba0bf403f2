"""The collectives of a lane: in place, counted, and named while they wait.

Note [Two-hop gathers]
----------------------
With `communication.two_hop_gathers`, where the shard axis spans N nodes of n ranks (`node` x `cross`, rank c n + i is
rank i of node c), each gather over it is done in two steps. First over `cross`: each rank gets what its counterparts in
the other nodes have. Then over `node`, one gather for each node's part of the whole, all in one call: a rank has one
segment of each by then. For a lane of b bytes and W = N n ranks

    sent by a rank      one hop, over `shard`     b (W - 1) / W, through whichever links the ring has
                        two hops, over `cross`    b (N - 1) / (N n)
                                  over `node`     b (n - 1) / n

so that each byte goes once to each node, and the steps that wait for one another are N - 1 + n - 1, not W - 1. Between
the hops a buffer of b / n bytes holds what came over `cross`.
Source: Zhang et al., 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ourshard.config import ReduceOp, ShardConfig
from ourshard.runtime.control import Control
from ourshard.runtime.ledger import Kind, Ledger
from ourshard.runtime.mesh import Axis, Mesh, gathers_in_two_hops, speaks_nccl
from ourshard.runtime.meter import Spent
from ourshard.runtime.peer import PeerCopies, Reduction

reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # as all_gather_flat

# Lanes are gathered and reduced by the group's own methods, which spares the host what torch.distributed does around
# them for every call: looking for modes, ranks outside of the group, coalescing, options. torch 2.13 renamed them.
_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_gather_several = (
    getattr(dist.ProcessGroup, "all_gather_single_coalesced", None) or dist.ProcessGroup.allgather_into_tensor_coalesced
)
_scatter = getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base


def _synchronous(options: Any) -> Any:
    options.asyncOp = False  # on the current stream
    return options


def _scattering(op: dist.ReduceOp.RedOpType) -> Any:
    options = _synchronous(dist.ReduceScatterOptions())
    options.reduceOp = op
    return options


_GATHERING = _synchronous(dist.distributed_c10d.AllgatherOptions())
_SUMMING, _AVERAGING = _scattering(dist.ReduceOp.SUM), _scattering(dist.ReduceOp.AVG)


_KNOWN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # to all backends


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View `tensor` as bytes where the backend has no kernel for its dtype (8-bit floats, booleans)."""
    if tensor.dtype in _KNOWN:
        return tensor
    return tensor.view(-1).view(torch.uint8)  # a 0-d one has no other bytes to view


@dataclass(frozen=True, slots=True)
class Hops:
    """The axes of a gather in two hops: Note [Two-hop gathers]."""

    node: Axis
    cross: Axis


@dataclass(slots=True)
class Arrival:
    """What `Collectives.exchange` brings. What is sent and received is kept until `wait`."""

    received: torch.Tensor
    sent: torch.Tensor
    work: dist.Work | None  # None once it is there
    control: Control
    label: str

    def wait(self) -> torch.Tensor:
        """Make the current stream wait, or on a CPU the host, and return what came. Idempotent."""
        if self.work is not None:
            with self.control.waiting(self.label):
                self.control.finish(self.work)
            self.work = None
        return self.received


def hops_of(config: ShardConfig, mesh: Mesh) -> Hops | None:
    """Return the axes of gathers over `shard`, where they go in two hops."""
    two = gathers_in_two_hops(config, mesh.node.size, mesh.cross.size)
    return Hops(mesh.node, mesh.cross) if two else None


class Collectives:
    """Issue collectives on the current stream. Each is a no-op on an axis of one rank."""

    def __init__(self, control: Control, ledger: Ledger | None, hops: Hops | None = None) -> None:
        self.control = control
        self.hops = hops
        self.ledger = ledger
        self.peer: PeerCopies | None = None  # set by the engine, where copy engines can do it

    def fill_slot(
        self,
        whole: torch.Tensor,
        segment: torch.Tensor,
        axis: Axis,
        label: str,
        source: torch.Tensor | None = None,
    ) -> None:
        """All-gather a slot on the gather stream; by peer copies where there are any, and they hold it.

        `source`: what the segment is to hold, any dtype, where it does not yet.
        """
        peer = self.peer
        if peer is not None and (axis.name != peer.axis.name or not peer.can_gather(segment)):
            peer = None
        if source is not None and (peer is None or source.device != segment.device):
            segment.copy_(source, non_blocking=True)
            source = None
        if peer is None:
            self.all_gather(whole, segment, axis, label)
            return
        if self.ledger is not None:
            self._count_others("all_gather", axis, whole.nbytes)
        peer.gather(whole, segment, source)

    def peer_reduce(self, pieces: list[Reduction], label: str) -> None:
        """Reduce pieces of the peers' arena, on the reduce stream; see `PeerCopies.reduce`."""
        assert self.peer is not None
        axis = self.peer.axis
        self._count_others("reduce_scatter", axis, sum(piece.whole.nbytes for piece in pieces))
        self.peer.reduce(pieces)

    def peer_reduce_in_pieces(self, lane: Reduction) -> None:
        """Reduce a lane that is larger than the peers' arena; see `PeerCopies.reduce_in_pieces`."""
        assert self.peer is not None
        axis = self.peer.axis
        self._count_others("reduce_scatter", axis, lane.whole.nbytes)
        self.peer.reduce_in_pieces(lane)

    def all_gather(self, whole: torch.Tensor, segment: torch.Tensor, axis: Axis, label: str) -> None:
        """Fill `whole` with the `segment` of every rank; `segment` is this rank's part of `whole`."""
        if axis.size == 1:
            return
        if self.hops is not None and axis.name == "shard":
            self._gather_in_two_hops(whole, segment, self.hops, label)
            return
        if self.ledger is not None:
            self._count_others("all_gather", axis, whole.nbytes)
        assert axis.group is not None
        if whole.dtype not in _KNOWN:
            whole, segment = _bytes(whole), _bytes(segment)
        with self.control.waiting(f"gather of {label}", Spent.GATHER):
            self.control.finish(_gather(axis.group, whole, segment, _GATHERING))

    def _gather_in_two_hops(self, whole: torch.Tensor, segment: torch.Tensor, hops: Hops, label: str) -> None:
        """Follow Note [Two-hop gathers]. `whole` may be bytes or values."""
        node, cross = hops.node, hops.cross
        blocks = _bytes(whole).view(cross.size, node.size, -1)
        # Made, used and freed on one stream, so that its allocator can give the bytes to the next gather.
        came = blocks.new_empty(cross.size, blocks.size(-1))
        self._hold(came.nbytes)
        came[cross.rank].copy_(_bytes(segment).view(-1))
        self.all_gather(came.view(-1), came[cross.rank], cross, label)
        for here in range(cross.size):
            if here != cross.rank:  # the segment itself may be a master, which the compute stream steps meanwhile
                blocks[here, node.rank].copy_(came[here])
        self._count_others("all_gather", node, whole.nbytes)
        wholes, segments = [block.view(-1) for block in blocks], [block[node.rank] for block in blocks]
        assert node.group is not None
        with self.control.waiting(f"gather of {label}", Spent.GATHER):
            self.control.finish(_gather_several(node.group, wholes, segments, _GATHERING))
        self._hold(-came.nbytes)

    def reduce_scatter(
        self, segment: torch.Tensor, whole: torch.Tensor, axis: Axis, label: str, mean: bool = False
    ) -> None:
        """Sum `whole` over the axis, or take the mean; leave this rank's part in `segment`, which may be in `whole`."""
        if axis.size == 1:
            return
        if self.ledger is not None:
            self._count_others("reduce_scatter", axis, whole.nbytes)
        assert axis.group is not None
        with self.control.waiting(f"reduce of {label}", Spent.REDUCE):
            self.control.finish(_scatter(axis.group, segment, whole, _AVERAGING if mean else _SUMMING))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, axis: Axis, label: str) -> None:
        """Send one equal part of `sent` to each rank of the axis; `received` gets theirs, in the order of ranks."""
        if axis.size == 1:
            return
        self._count_others("all_to_all", axis, sent.nbytes)
        with self.control.waiting(f"reduce of {label}", Spent.REDUCE):
            host = self.control.host_waits
            self.control.finish(dist.all_to_all_single(received, sent, group=axis.group, async_op=host))

    def exchange(self, sent: torch.Tensor, lengths: list[int], counts: list[int], axis: Axis, label: str) -> Arrival:
        """Begin to send `lengths[r]` elements of `sent` to each rank r, and to receive `counts[r]`, both in order."""
        if axis.size == 1:
            return Arrival(sent, sent, None, self.control, label)
        received = sent.new_empty(sum(counts))
        width = sent.element_size()
        self._count("exchange", axis, (sent.numel() - lengths[axis.rank]) * width)
        arriving, leaving = ([number * width for number in numbers] for numbers in (counts, lengths))
        coming, going = received.view(torch.uint8), sent.view(torch.uint8)
        work = dist.all_to_all_single(coming, going, arriving, leaving, group=axis.group, async_op=True)
        return Arrival(received, sent, work, self.control, label)

    def all_reduce(
        self, tensor: torch.Tensor, axis: Axis, label: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Sum `tensor` over the axis in place."""
        if axis.size == 1:
            return
        self._count_others("all_reduce", axis, 2 * tensor.nbytes)
        with self.control.waiting(f"reduce of {label}", Spent.REDUCE):
            self.control.finish(dist.all_reduce(tensor, op=op, group=axis.group, async_op=self.control.host_waits))

    def broadcast(self, tensor: torch.Tensor, axis: Axis, label: str, source: int = 0) -> None:
        """Copy `tensor` of the axis's rank `source` to all its ranks, in place."""
        if axis.size == 1:
            return
        self._count("broadcast", axis, tensor.nbytes)
        with self.control.waiting(f"broadcast of {label}"):
            host = self.control.host_waits
            self.control.finish(dist.broadcast(_bytes(tensor), group_src=source, group=axis.group, async_op=host))

    def _count_others(self, name: str, axis: Axis, nbytes: int) -> None:
        """Count `nbytes` but for this rank's own part of them."""
        self._count(name, axis, nbytes * (axis.size - 1) // axis.size)

    def _hold(self, nbytes: int) -> None:
        if self.ledger is not None:
            self.ledger.hold(Kind.SLOT, nbytes)

    def _count(self, name: str, axis: Axis, nbytes: int) -> None:
        if self.ledger is not None:
            self.ledger.collective(name, axis.name, nbytes)


class Reducer:
    """Means over axes, safe in 16 bits (Note [Split divide]), or sums, as `communication.reduce_op` says.

    Note [Split divide]
    fp16 ends at 65504: a sum over many ranks overflows where the mean would not, and dividing first loses small values.
    So the divide is split in two factors of about the square root of the number of ranks, before and after the sum.
    Wider ranges divide once, after; NCCL does it as it adds, where the factor is a power of two and so exact.
    """

    def __init__(self, collectives: Collectives, op: ReduceOp) -> None:
        self._collectives = collectives
        self._op = op
        self._factors: dict[tuple[str, torch.dtype], tuple[int, float, bool]] = {}  # of scatters: `_factors_of`

    def divisor(self, axis: Axis) -> int:
        """Return what a sum over the axis is divided by: its ranks, or 1."""
        return axis.size if self._op is ReduceOp.MEAN else 1

    def scatter(self, segment: torch.Tensor, whole: torch.Tensor, axis: Axis, label: str) -> None:
        """Leave this rank's part of `whole`, reduced over the axis, in `segment`, which may be in `whole`."""
        if axis.size == 1:
            return
        key = axis.name, whole.dtype
        if key not in self._factors:
            self._factors[key] = _factors_of(whole.dtype, axis, self.divisor(axis))
        before, after, mean = self._factors[key]
        if before > 1:
            whole.div_(before)
        self._collectives.reduce_scatter(segment, whole, axis, label, mean)
        if after > 1:
            segment.div_(after)

    def reduce(self, tensor: torch.Tensor, axis: Axis, label: str) -> None:
        """Replace `tensor` by what it is reduced to over the axis."""
        if axis.size == 1:
            return
        divisor = self.divisor(axis)
        before = _first_factor(tensor.dtype, divisor)
        if before > 1:
            tensor.div_(before)
        self._collectives.all_reduce(tensor, axis, label)
        if divisor > 1:
            tensor.div_(divisor / before)


def _factors_of(dtype: torch.dtype, axis: Axis, divisor: int) -> tuple[int, float, bool]:
    """Return what to divide by before and after a sum over `axis`, and whether its group takes the mean instead."""
    exact = divisor > 1 and divisor & (divisor - 1) == 0
    if dtype != torch.float16 and exact and speaks_nccl(axis.group):
        return 1, 1, True
    before = _first_factor(dtype, divisor)
    return before, divisor / before, False


def _first_factor(dtype: torch.dtype, divisor: int) -> int:
    if dtype != torch.float16:
        return 1
    factor = 1
    while factor * factor * 4 <= divisor:
        factor *= 2
    return factor
