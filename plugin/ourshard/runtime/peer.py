"""Gather and reduce between the GPUs of one host by their copy engines.

Note [Peer copies]
------------------
NCCL's kernels take multiprocessors from the model: beside an all-gather a bf16 matrix product ran at 574 of 787 TFLOP/s
(H200). Between GPUs that can read each other's memory the same bytes can be moved by the copy engines:

* gather: each rank puts its segment into a staging buffer that its peers can map, all meet at a barrier on the
  gather stream, and each pulls the segments of the others into its own slot. Two staging buffers take turns: when one
  is written again, its rank has passed the barrier of the gather in between, so every peer has done its pulls. One
  kernel casts a master to both places: what such kernels move delays the first kernels of the unit that computes.
* reduce: whole gradients are collected in a buffer that peers can map (the arena), all meet, each pulls its part from
  the others, all meet again, and one kernel adds the parts in fp32, scales and accumulates. It leaves the norm of
  each block of the sum, so that clipping need not read the gradients again: Note [Known norms] in norms.py.

The arena holds one unit; it is filled and read on the reduce stream, so units follow each other without a wait on the
compute stream. Lanes that do not fit (large embeddings and heads) are reduced in pieces, and gathered through NCCL. All
ranks decide alike, from sizes alone.
Memory that peers map is allocated outside of torch's caching allocator; the ledger counts it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, NamedTuple

import torch

from ourshard.config import Transport
from ourshard.runtime.ledger import Kind
from ourshard.runtime.mesh import Axis, speaks_nccl

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.unit import Unit

_ALIGN = 512  # bytes between pieces of a shared buffer
PIECE_NBYTES = 32 * 2**20  # least size of the arena where larger lanes go through it in pieces
BLOCK = 2048  # elements that an instance of a kernel has, each block with a norm of its own
_CAST = (torch.float32, torch.bfloat16, torch.float16)  # that the kernel casts between
_GATHER, _REDUCE = 0, 1  # barrier channels: the two streams meet independently


class _Gather(NamedTuple):
    """The views that gather one slot: what it is, and for each turn the stage, in its dtype, and bytes (to, from)."""

    whole: torch.Tensor
    turns: list[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]


class _Pull(NamedTuple):
    """The views that reduce one lane: this rank's part, the same parts of the peers, and how these come (to, from)."""

    own: torch.Tensor
    parts: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class PeerCopies:
    """Shared buffers of one mesh axis and the copies between them. Calls are collective over the axis."""

    def __init__(self, axis: Axis, device: torch.device, staging_nbytes: int, arena_nbytes: int, divisor: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.axis = axis
        self._divisor = divisor  # of sums of gradients
        self._staging_nbytes = _aligned(staging_nbytes)
        self._arena_nbytes = _aligned(arena_nbytes)
        self._arena_start = 2 * self._staging_nbytes
        self.nbytes = self._arena_start + self._arena_nbytes
        self._shared = symmetric.empty(self.nbytes, dtype=torch.uint8, device=device)
        assert axis.group is not None
        self._handle = symmetric.rendezvous(self._shared, axis.group)
        others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
        # Each peer's whole buffer as bytes, nearest first: so that no peer is read by all at once.
        self._peers = [(peer, self._handle.get_buffer(peer, (self.nbytes,), torch.uint8)) for peer in others]
        self._pulled = torch.empty(0, dtype=torch.uint8, device=device)
        self._turn = 0
        self._lent = 0  # bytes of the arena in use
        # Buffers come back, and views of them are most of what a copy costs on the host: they are made once.
        self._gathers: dict[int, _Gather] = {}  # by the id of the slot's tensor
        self._loans: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}  # by start, elements, dtype
        self._pulls: dict[tuple[tuple[int, int, torch.dtype], ...], list[_Pull]] = {}  # by what was lent together

    def meet(self) -> None:
        """Wait until the peers' gathers so far have ended: before staging is used out of turn. On the gather stream."""
        self._handle.barrier(channel=_GATHER)

    def can_gather(self, segment: torch.Tensor) -> bool:
        return segment.nbytes <= self._staging_nbytes

    def gather(self, whole: torch.Tensor, segment: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """Fill `whole` with every rank's `segment`, which is this rank's part of it. On the gather stream.

        `source`: what the segment is to hold, any dtype, on the device; None where it is there.
        """
        plan = self._gathers.get(id(whole))
        if plan is None or plan.whole is not whole:
            plan = self._gathers[id(whole)] = self._plan_gather(whole, segment)
        staged, pulls = plan.turns[self._turn]
        self._turn ^= 1
        if source is None:
            staged.copy_(segment)
        else:
            copy_twice(source, segment, staged)
        self._handle.barrier(channel=_GATHER)
        for target, there in pulls:
            target.copy_(there)

    def _plan_gather(self, whole: torch.Tensor, segment: torch.Tensor) -> _Gather:
        nbytes, target = segment.nbytes, whole.view(torch.uint8)
        turns = []
        for start in (0, self._staging_nbytes):
            pulls = [
                (target[peer * nbytes : (peer + 1) * nbytes], buffer[start : start + nbytes])
                for peer, buffer in self._peers
            ]
            turns.append((self._shared[start : start + nbytes].view(segment.dtype), pulls))
        return _Gather(whole, turns)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a piece of the arena for whole gradients, or None if it does not fit.

        It is filled, read and given back on the reduce stream, in order; no other stream may touch it.
        """
        nbytes = _aligned(numel * dtype.itemsize)
        if self._lent + nbytes > self._arena_nbytes:
            return None
        start = self._arena_start + self._lent
        self._lent += nbytes
        loan = self._loans.get((start, numel, dtype))
        if loan is None:
            loan = self._shared[start : start + numel * dtype.itemsize].view(dtype)
            self._loans[start, numel, dtype] = loan
        return loan

    def reduce(self, pieces: list[Reduction]) -> None:
        """Reduce pieces that were lent together, and end the loan. On the reduce stream."""
        self._handle.barrier(channel=_REDUCE)
        lent = tuple((piece.whole.data_ptr(), piece.whole.numel(), piece.whole.dtype) for piece in pieces)
        pulls = self._pulls.get(lent)
        if pulls is None:
            pulls = self._pulls[lent] = self._plan_pulls([piece.whole for piece in pieces])
        for pull in pulls:
            for target, source in pull.copies:
                target.copy_(source)
        for piece, pull in zip(pieces, pulls, strict=True):
            add_parts(piece.out, piece.norms, pull.own, pull.parts, self._divisor, add=piece.add)
        self._handle.barrier(channel=_REDUCE)
        self._lent = 0

    def _plan_pulls(self, wholes: list[torch.Tensor]) -> list[_Pull]:
        size, rank = self.axis.size, self.axis.rank
        need = sum(_aligned(whole.nbytes // size) for whole in wholes) * (size - 1)
        if self._pulled.nbytes < need:
            self._pulled = torch.empty(need, dtype=torch.uint8, device=self._shared.device)
            self._pulls.clear()
        pulls, done = [], 0
        for whole in wholes:
            nbytes = whole.nbytes // size
            start = whole.storage_offset() * whole.element_size() + rank * nbytes
            pulled = self._pulled[done : done + nbytes * (size - 1)]
            copies = [
                (pulled[index * nbytes : (index + 1) * nbytes], buffer[start : start + nbytes])
                for index, (_, buffer) in enumerate(self._peers)
            ]
            pulls.append(_Pull(whole.view(size, -1)[rank], pulled.view(whole.dtype), copies))
            done += _aligned(nbytes) * (size - 1)
        return pulls

    def reduce_in_pieces(self, lane: Reduction) -> None:
        """Reduce a lane (size * n,) that is larger than the arena, piece by piece. As `reduce`."""
        whole, out = lane.whole, lane.out
        parts = whole.view(self.axis.size, -1)
        step = self._arena_nbytes // (self.axis.size * whole.element_size())
        step -= step % BLOCK if step < out.numel() else 0
        for start in range(0, out.numel(), step):
            part = parts[:, start : start + step]
            piece = self.lend(part.numel(), whole.dtype)
            assert piece is not None
            piece.view(part.shape).copy_(part)
            norms = lane.norms[start // BLOCK :]
            self.reduce([Reduction(piece, out[start : start + step], norms, lane.add)])

    def abandon(self) -> None:
        """End all loans after an exception."""
        self._lent = 0


class Reduction:
    """One lane's part in a reduction: this rank's part of `whole`, reduced, is put in, or added to, `out`.

    The norm of each `BLOCK` elements of `out` is left in `norms`.
    """

    __slots__ = ("add", "norms", "out", "whole")

    def __init__(self, whole: torch.Tensor, out: torch.Tensor, norms: torch.Tensor, add: bool) -> None:
        self.whole = whole
        self.out = out
        self.norms = norms
        self.add = add


def add_parts(
    out: torch.Tensor, norms: torch.Tensor, own: torch.Tensor, pulled: torch.Tensor, divisor: int, *, add: bool
) -> None:
    """Set `out` (n,) to the sum in fp32 of `own` (n,) and the parts in `pulled`, divided; or add it.

    The first values of `norms` (fp32) become the norms of each `BLOCK` elements of `out`.
    """
    from ourshard.runtime.peer_kernels import add_parts as kernel

    kernel(out, norms, own, pulled, divisor, add=add)


def copy_twice(source: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Copy `source` (n,) to `first` and `second`, which have one dtype; read once where a kernel casts so."""
    if source.dtype not in _CAST or first.dtype not in _CAST:
        first.copy_(source)
        second.copy_(first)
        return
    from ourshard.runtime.peer_kernels import copy_twice as kernel

    kernel(source, first, second)


def make_peer_copies(engine: Engine) -> PeerCopies | str:
    """Return peer copies sized for all units but the root, or why there are none. Collective.

    Needs CUDA, one host, and GPUs that reach each other's memory. With `Transport.PEER` a machine that can't
    raises `ValueError`.
    """
    axis, device, control = engine.mesh.shard, engine.mesh.device, engine.control
    wanted = engine.config.communication.transport
    if axis.size == 1:
        return "one rank has a whole copy"
    if device.type != "cuda":
        return "there is no GPU"
    if wanted is Transport.NCCL:
        return "as communication.transport says"
    staging, arena = _sizes(engine.units)
    peer, why = None, _why_not(axis, device, arena)
    reasons = control.gather_objects(why, "looking for peer GPUs")
    problems = [str(reason) for reason in reasons if reason]
    if len(set(control.gather_objects(socket.gethostname(), "looking for peer GPUs"))) > 1:
        problems.append("the ranks are on several hosts")
    if not problems:
        try:
            peer = PeerCopies(axis, device, staging, arena, engine.reducer.divisor(axis))
        except Exception as problem:
            problems.append(f"shared buffers failed ({type(problem).__name__}: {problem})")
        failed = control.gather_objects(problems, "making buffers that peers can map")
        problems = [text for texts in failed for text in texts]  # type: ignore[attr-defined]
    if problems:
        if wanted is Transport.PEER:
            raise ValueError(f"communication.transport: peer copies can't work here: {problems[0]}.")
        return problems[0]
    assert peer is not None
    if engine.ledger is not None:
        engine.ledger.hold(Kind.REDUCE, peer.nbytes)
    return peer


def _why_not(axis: Axis, device: torch.device, arena: int) -> str | None:
    if not arena:
        return "there are no units besides the root"
    count = torch.cuda.device_count()
    if not all(
        torch.cuda.can_device_access_peer(device.index, other) for other in range(count) if other != device.index
    ):
        return "some GPUs can't reach each other's memory"
    if axis.size > count:
        return "this process sees fewer GPUs than the axis has ranks"
    return None if speaks_nccl(axis.group) else "the process group does not speak NCCL"


def _sizes(units: list[Unit]) -> tuple[int, int]:
    """Return the largest segment and the largest unit of whole gradients, in bytes, of units that are not rooted."""
    staging = arena = 0
    for unit in (unit for unit in units if not unit.rooted):
        sharded = [lane for lane in unit.lanes if not lane.placement.whole]
        staging = max([staging, *(lane.segment.nbytes for lane in sharded)])
        arena = max(
            arena, sum(_aligned(lane.layout.numel * lane.lent_dtype.itemsize) for lane in sharded if lane.trainable)
        )
    rooted = [lane for unit in units if unit.rooted for lane in unit.lanes if not lane.placement.whole]
    large = max(
        (_aligned(lane.layout.numel * lane.lent_dtype.itemsize) for lane in rooted if lane.trainable), default=0
    )
    return staging, max(arena, min(large, PIECE_NBYTES)) if arena else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
