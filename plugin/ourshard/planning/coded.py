"""Reductions of coded gradients as moves and bytes: what `runtime/coded_gradients.py` does, Note [Coded gradients]."""

from __future__ import annotations

from ourshard.config import ShardConfig
from ourshard.planning.layouts import PlannedLane
from ourshard.planning.moves import Collective, MeshSizes
from ourshard.runtime.coded_gradients import coded_numels, in_two_hops, replica_part


def coded_reduction(lane: PlannedLane, mesh: MeshSizes, config: ShardConfig, *, sync: bool) -> list[Collective]:
    """Return the collectives of one reduction; with `sync` the replicas' too."""
    assert lane.grad_codec is not None
    whole = lane.grad_codec.nbytes(lane.numel)
    calls = [Collective("all_to_all", "shard", whole)]
    if in_two_hops(config, mesh.node, mesh.cross):
        calls = [Collective("all_to_all", "node", whole), Collective("all_to_all", "cross", whole // mesh.node)]
    if sync and lane.replicas > 1:
        calls.append(Collective("all_to_all", "replicate", lane.grad_codec.nbytes(lane.shard_numel)))
    elif sync:
        whole = _replica_nbytes(lane, mesh)
        calls += [Collective(name, "replicate", whole) for name in ("all_to_all", "all_gather")]
    return calls


def messages_nbytes(lane: PlannedLane, mesh: MeshSizes, config: ShardConfig, *, sync: bool) -> int:
    """Return the most bytes that one reduction of a lane holds: messages, and sums in a node. 0 where it is exact."""
    if lane.grad_codec is None:
        return 0
    held = 2 * lane.grad_codec.nbytes(lane.numel)
    if in_two_hops(config, mesh.node, mesh.cross) and lane.reduce_nbytes < 4:
        held += 4 * lane.numel // mesh.node
    gathers = sync and mesh.replicate > 1 and lane.replicas == 1
    return max(held, 2 * _replica_nbytes(lane, mesh)) if gathers else held


def residual_nbytes(lane: PlannedLane, mesh: MeshSizes, config: ShardConfig) -> int:
    """Return the bytes of error feedback: Note [Error feedback]. 0 where there is none."""
    if lane.grad_codec is None or not config.communication.error_feedback:
        return 0
    sizes = {axis: mesh.of(axis) for axis in ("shard", "replicate", "node", "cross")}
    return 4 * sum(coded_numels(config, lane.numel, sizes).values())


def _replica_nbytes(lane: PlannedLane, mesh: MeshSizes) -> int:
    """Return the bytes of a shard as messages, one for each replica."""
    assert lane.grad_codec is not None
    part = replica_part(lane.shard_numel, mesh.replicate, lane.grad_codec.block)
    return lane.grad_codec.nbytes(part * mesh.replicate)
