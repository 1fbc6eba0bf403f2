"""Reductions of gradients as blocks of few bits (qgZ), in one hop or two.

Note [Coded gradients]
----------------------
With `communication.gradients` a lane of matrices is reduced over the shard axis by all-to-alls of messages. Codes and
scales are in one buffer, so a hop is one collective; sums are in float32; a rank's own part is coded as all others are.

One hop, where all ranks are in one node: each rank codes its whole gradient, a message for every rank, and takes the
mean of what it receives.

Two hops, where the shard axis spans N nodes of n ranks (`node` x `cross`, rank c n + i is rank i of node c):

    codes of the whole, by rank          0,0  0,1  1,0  1,1        (node, rank in it), N = n = 2
    put in the order of receivers        0,0  1,0  0,1  1,1
    all-to-all in the node               rank i of it gets all  c,i
    mean in float32, coded again         N parts
    all-to-all between the nodes         node c gets  c,i : the mean is the shard

So between nodes each rank sends 1/n of the bytes. A value is coded twice then, once for each hop.

Over `replicate` what the rank keeps is reduced when syncing: an all-to-all of messages, the mean in float32, and a
gather of the means, coded again, so that all replicas have the same bits. A shard that does not cut into whole blocks
for each replica is padded with zeros. Divided masters (Note [Divided masters] in divided.py) take their part of the
mean, and no gather follows.

A block with a NaN or an infinity is NaN in the mean, which loss scalers and clipping see. With `reduce_op: sum` each
mean here is a sum.

Note [Error feedback]
---------------------
With `communication.error_feedback` what a codec lost of a buffer is kept, in float32, and added to the same buffer
before it is coded the next time: one residual for each time that a value is coded (`Site`). So over steps nothing is
lost, only late. The residual of `sent` is as large as the whole lane, on each rank. Residuals are this rank's alone:
checkpoints have those of all ranks, by rank, and a world of another size or layout begins with zeros.
They have the unit of the gradients: `ShardGradScaler` multiplies them whenever its scale changes.
Source: Karimireddy et al., 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes".

With `communication.stochastic_rounding` the noise is a hash of `communication.seed`, lane, rank, site, the number of
the lane's reduction, which checkpoints have too, and the element's place. The same run gives the same bits.
Source: Wang et al., 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import torch

from ourshard.config import Codec, CommunicationConfig, OptimizerOver, ShardConfig
from ourshard.runtime.codec import BlockCodec
from ourshard.runtime.ledger import Kind

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.mesh import Axis


def gradient_codec(config: CommunicationConfig) -> BlockCodec | None:
    """Return the codec of reductions."""
    if config.gradients is Codec.NONE:
        return None
    return BlockCodec(config.gradients, config.block_of(config.gradients), stochastic=config.stochastic_rounding)


def replica_part(shard_numel: int, replicas: int, block: int) -> int:
    """Return the elements of a shard that one replica reduces: whole blocks, the padding of the last counted."""
    return -(-shard_numel // (replicas * block)) * block


def in_two_hops(config: ShardConfig, node: int, cross: int) -> bool:
    """Say whether reductions go over `node` and then `cross`, axes of these sizes."""
    return node > 1 and cross > 1 and config.communication.node_size != 1


class Site(Enum):
    """Where a gradient is coded on its way."""

    SENT = "sent"  # the whole of this rank
    NODE = "node"  # the mean in the node, or the sum, for the other nodes
    REPLICA = "replica"  # the shard, for the other replicas
    MEAN = "mean"  # of the replicas, or their sum: the part that this rank has reduced


def coded_numels(config: ShardConfig, numel: int, sizes: Mapping[str, int]) -> dict[Site, int]:
    """Return the elements coded at each site, of a lane of `numel` elements; `sizes` are the axes' by name."""
    numels = {Site.SENT: numel}
    if in_two_hops(config, sizes["node"], sizes["cross"]):
        numels[Site.NODE] = numel // sizes["node"]
    if sizes["replicate"] > 1:
        block = config.communication.block_of(config.communication.gradients)
        part = replica_part(numel // sizes["shard"], sizes["replicate"], block)
        numels[Site.REPLICA] = part * sizes["replicate"]
        if config.shard_optimizer_over is OptimizerOver.SHARD:  # else no gather of it follows
            numels[Site.MEAN] = part
    return numels


class GradientCoder:
    """Reduce the gradients of one lane coded: Note [Coded gradients]. All calls are on the reduce stream.

    `number` tells the lane from all others of the model, alike on all ranks; `numel` is of the whole lane.
    """

    def __init__(self, engine: Engine, codec: BlockCodec, label: str, number: int, numel: int) -> None:
        self.codec = codec
        self.reductions = 0  # begun; the noise of stochastic rounding depends on it
        self.residuals: dict[Site, torch.Tensor] = {}  # Note [Error feedback]
        self._engine = engine
        self._label = label
        self._number = number
        self._numel = numel

    def make_residuals(self) -> None:
        """Take the memory of error feedback, where it is asked for. Idempotent."""
        mesh, config = self._engine.mesh, self._engine.config
        if self.residuals or not config.communication.error_feedback:
            return
        sizes = {axis.name: axis.size for axis in (mesh.shard, mesh.replicate, mesh.node, mesh.cross)}
        for site, numel in coded_numels(config, self._numel, sizes).items():
            self.residuals[site] = torch.zeros(numel, device=mesh.device)
            self._hold(4 * numel, Kind.RESIDUAL)

    def _encode(self, site: Site, values: torch.Tensor, out: torch.Tensor, parts: int = 1) -> None:
        seed = self._seed(site) if self.codec.stochastic else None
        if self.residuals:
            self.codec.encode_with_feedback(values, self.residuals[site], out, seed=seed, parts=parts)
        else:
            self.codec.encode(values, out, seed=seed, parts=parts)

    def _seed(self, site: Site) -> int:
        seed = self._engine.config.communication.seed
        for word in (self._number, self._engine.mesh.world.rank, list(Site).index(site), self.reductions):
            seed = seed << 32 | word
        return seed

    def scatter(self, segment: torch.Tensor, whole: torch.Tensor) -> None:
        """Leave this rank's part of `whole`, reduced over the shard axis, in `segment`, a part of `whole`.

        `whole` (numel of the lane) is used up.
        """
        axis = self._engine.mesh.shard
        message = self.codec.nbytes(segment.numel())
        self.make_residuals()
        self.reductions += 1
        with self._messages(axis.size * message, whole.device) as (sent, received):
            if in_two_hops(self._engine.config, self._engine.mesh.node.size, self._engine.mesh.cross.size):
                self._two_hops(segment, whole, sent, received)
                return
            self._encode(Site.SENT, whole, sent, axis.size)
            self._exchange(received, sent, axis)
            self._add(received, segment, axis)

    def _two_hops(self, segment: torch.Tensor, whole: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> None:
        node, cross = self._engine.mesh.node, self._engine.mesh.cross
        message = sent.numel() // (node.size * cross.size)
        self._encode(Site.SENT, whole, received, node.size * cross.size)
        _swap(received, sent, cross.size, node.size)
        self._exchange(received, sent, node)
        _swap(received, sent, node.size, cross.size)  # all that the node has for one receiver is together then
        with self._sums(whole, segment.numel() * cross.size) as sums:
            parts = sent.view(cross.size, -1)
            for number, total in enumerate(sums.view(cross.size, -1)):
                self._add(parts[number], total, node)
            outgoing, incoming = sent[: cross.size * message], received[: cross.size * message]
            self._encode(Site.NODE, sums, outgoing, cross.size)
        self._exchange(incoming, outgoing, cross)
        self._add(incoming, segment, cross)

    def reduce_part(self, own: torch.Tensor, segment: torch.Tensor) -> None:
        """Leave this rank's part of `segment`, reduced over `replicate`, in `own`, where masters are divided."""
        axis = self._engine.mesh.replicate
        with self._messages(self.codec.nbytes(segment.numel()), segment.device) as (sent, received):
            self._encode(Site.REPLICA, segment, sent, axis.size)
            self._exchange(received, sent, axis)
            self._add(received, own, axis)

    def reduce_replicas(self, segment: torch.Tensor) -> None:
        """Replace `segment`, what this rank keeps of the lane, by what it is reduced to over `replicate`."""
        axis = self._engine.mesh.replicate
        part = replica_part(segment.numel(), axis.size, self.codec.block)
        message = self.codec.nbytes(part)
        padded = segment
        if part * axis.size > segment.numel():
            padded = segment.new_zeros(part * axis.size)
            padded[: segment.numel()].copy_(segment)
        with self._messages(axis.size * message, segment.device) as (sent, received):
            self._encode(Site.REPLICA, padded, sent, axis.size)
            self._exchange(received, sent, axis)
            reduced = torch.empty(part, device=segment.device)
            self._add(received, reduced, axis)
            own = sent[axis.rank * message : (axis.rank + 1) * message]
            self._encode(Site.MEAN, reduced, own)
            self._engine.collectives.all_gather(sent, own, axis, self._label)
            self.codec.decode(sent, padded, parts=axis.size)
        if padded is not segment:
            segment.copy_(padded[: segment.numel()])

    def _add(self, received: torch.Tensor, out: torch.Tensor, axis: Axis) -> None:
        """Decode the messages of the axis's ranks, and leave their mean in `out`, or their sum."""
        self.codec.decode_sum(received, out, 1 / self._engine.reducer.divisor(axis), parts=axis.size)

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor, axis: Axis) -> None:
        self._engine.collectives.all_to_all(received, sent, axis, self._label)

    @contextmanager
    def _messages(self, nbytes: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Lend two buffers of messages; made, used and freed on one stream, so that its allocator has them back."""
        sent = torch.empty(nbytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        self._hold(2 * nbytes)
        yield sent, received
        self._hold(-2 * nbytes)

    @contextmanager
    def _sums(self, whole: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
        """Lend memory for the sums of a node, in float32: `whole` itself, which has been coded, where it is that."""
        if whole.dtype == torch.float32:
            yield whole[:numel]
            return
        sums = torch.empty(numel, device=whole.device)
        self._hold(sums.nbytes)
        yield sums
        self._hold(-sums.nbytes)

    def _hold(self, nbytes: int, kind: Kind = Kind.REDUCE) -> None:
        if self._engine.ledger is not None:
            self._engine.ledger.hold(kind, nbytes)


def rescale_residuals(engine: Engine, factor: torch.Tensor) -> None:
    """Multiply what codecs lost of gradients: the loss is scaled by another number from now on."""
    with engine.streams.reduce:
        for coder in (lane.coder for lane in engine.lanes() if lane.coder is not None):
            for residual in coder.residuals.values():
                residual.mul_(factor)


def _swap(messages: torch.Tensor, out: torch.Tensor, rows: int, columns: int) -> None:
    """Copy rows x columns messages of equal size into `out`, columns first."""
    out.view(columns, rows, -1).copy_(messages.view(rows, columns, -1).transpose(0, 1))
