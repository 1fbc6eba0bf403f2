"""Bytes of a lane's buffers: Note [Buffers of a lane] in runtime/lane_store.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ourshard.config import Tier
from ourshard.planning.layouts import PlannedLane, PlannedModel
from ourshard.runtime.disk import padded
from ourshard.runtime.ledger import Kind
from ourshard.runtime.peer import PIECE_NBYTES
from ourshard.runtime.placement import At

_SHARD_KINDS = {Tier.NONE: Kind.SHARD, Tier.CPU: Kind.HOST, Tier.NVME: Kind.DISK}


def at_rest(lanes: Iterable[PlannedLane]) -> dict[Kind, int]:
    """Return what `LaneStore._make_buffers` holds."""
    held: Counter[Kind] = Counter()
    for lane in lanes:
        if not lane.sharded:
            held[Kind.MASTER if lane.direct else Kind.FULL] += lane.full_nbytes
        if not lane.aliased:
            held[master_kind(lane)] += lane.master_nbytes
        held[_SHARD_KINDS[lane.params_tier]] += lane.beside_nbytes
        held[Kind.SECONDARY] += lane.secondary_nbytes
    return dict(held)


def master_kind(lane: PlannedLane) -> Kind:
    if lane.on_disk:
        return Kind.DISK
    return Kind.HOST if lane.on_host else Kind.MASTER


def windows_nbytes(planned: PlannedModel, states: float) -> int:
    """Bytes of the host memory that lanes on a disk pass through: offload/windows.py, offload/parameters.py."""
    stepped = [padded(lane.master_nbytes) for lane in planned.lanes if lane.on_disk and lane.trainable]
    read = [padded(lane.read_nbytes) for lane in planned.lanes if lane.read_nbytes]
    masters = min(planned.windows, len(stepped)) * (1 + int(states)) * max(stepped, default=0)
    return masters + min(planned.windows, len(read)) * max(read, default=0)


def arriving_kind(lane: PlannedLane) -> Kind:
    return Kind.GRADIENT if lane.placement.grads is At.WHOLE else Kind.REDUCE


def peer_nbytes(planned: PlannedModel, ranks: int) -> tuple[int, int]:
    """Return the bytes of a staging buffer and of the arena: `_sizes` in runtime/peer.py."""
    staging = arena = large = 0
    for unit in planned.units:
        lanes = [lane for lane in unit.lanes if not lane.placement.whole]
        sent = [_aligned(lane.numel * travel_nbytes(lane)) for lane in lanes if lane.trainable]
        if unit.rooted:
            large = max([large, *sent])
            continue
        staging = max([staging, *(lane.full_nbytes // ranks for lane in lanes)])
        arena = max(arena, sum(sent))
    return _aligned(staging), _aligned(max(arena, min(large, PIECE_NBYTES))) if arena else 0


def travel_nbytes(lane: PlannedLane) -> int:
    """Bytes of an element of a gradient that peers copy: `Lane.lent_dtype`, with one replica."""
    return lane.reduce_nbytes if lane.on_host else min(lane.compute_nbytes, lane.reduce_nbytes)


def _aligned(nbytes: int, to: int = 512) -> int:
    return -(-nbytes // to) * to


def refilled_nbytes(lane: PlannedLane) -> int:
    """Bytes read and written at the start of a forward, where the user may have written to the masters he holds."""
    return lane.numel * (lane.store_nbytes + lane.compute_nbytes) if lane.placement.whole and not lane.direct else 0


def leaf_nbytes(lane: PlannedLane) -> int:
    """Bytes of the gradients that backward makes for a lane before the runtime takes them."""
    return lane.used_numel * lane.compute_nbytes if lane.trainable and not lane.direct else 0


def sent_nbytes(lane: PlannedLane) -> int:
    """Bytes of the buffer that a reduction reads; none where it is the gradient at rest."""
    return 0 if lane.direct and lane.reduce_nbytes == lane.store_nbytes else lane.numel * lane.reduce_nbytes


def cast_nbytes(lane: PlannedLane) -> int:
    """Bytes read and written to bring this rank's master into the slot."""
    return 0 if lane.aliased else lane.master_numel * (lane.store_nbytes + lane.compute_nbytes)


def summed_nbytes(lane: PlannedLane) -> int:
    """Bytes read and written to add a reduced gradient to the one at rest."""
    return 0 if lane.direct else lane.master_numel * (lane.reduce_nbytes + lane.store_nbytes)


def waiting_nbytes(lane: PlannedLane) -> int:
    """Bytes of the sum of backwards that do not sync, where masters are divided: `WaitingSum`."""
    return lane.shard_numel * lane.store_nbytes
