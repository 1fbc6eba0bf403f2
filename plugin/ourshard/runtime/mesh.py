"""The mesh: ranks that share one sharded copy (axis `shard`), and their counterparts elsewhere (axis `replicate`).

Where anything uses them, runs of neighbours on `shard` are an axis too (`node`), and their counterparts (`cross`):
Note [Secondary shard], Note [Coded gradients], Note [Two-hop gathers].
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ourshard.config import Codec, ShardConfig
from ourshard.runtime.wording import counted


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis as this rank sees it. `group` is None where the axis has one rank."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of this rank, and the group of host-side messages. All collectives of a model go through one mesh."""

    shard: Axis
    replicate: Axis
    world: Axis
    control: dist.ProcessGroup | None  # gloo over all ranks: agreements, never tensors of the model
    device: torch.device
    node: Axis = Axis("node", 1, 0, None)  # neighbours on `shard`; one rank where nothing uses the axis
    cross: Axis = Axis("cross", 1, 0, None)  # the ranks at this one's place in each node
    parts: tuple[int, ...] = (0,)  # of the world's ranks: which part each has of what is cut over shard x replicate

    @property
    def describe(self) -> str:
        if self.replicate.size == 1:
            return counted(self.shard.size, "rank")
        return f"{counted(self.replicate.size, 'replica')} x {counted(self.shard.size, 'shard')}"


_MESHES: dict[tuple[object, ...], Mesh] = {}
_HOST_GROUPS: dict[tuple[str, object], dist.ProcessGroup] = {}  # (purpose, default group) -> group
_LOCAL_SIZES: dict[tuple[object, int], list[int]] = {}  # default group, `local_size` -> that of every rank


def default_device() -> torch.device:
    """Return the CUDA device of a process whose group speaks NCCL, or that has a GPU and no group; else the CPU."""
    if dist.is_initialized():
        on_gpu = speaks_nccl(None)
    else:
        on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def speaks_nccl(group: dist.ProcessGroup | None) -> bool:
    """Say whether tensors on CUDA go through NCCL in `group`, None for the default one; it may have gloo for CPUs too.

    `get_backend` has no answer for groups of several backends, nor for those that were made without naming any.
    """
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def build_mesh(
    config: ShardConfig,
    mesh: Mesh | DeviceMesh | None = None,
    device: torch.device | None = None,
    compare: Callable[[ShardConfig], None] = lambda config: None,
) -> Mesh:
    """Return the mesh of `config`, making its groups once a process.

    Collective the first time: every rank must call it with the same config, which `compare` sees to. `mesh` may be a
    `DeviceMesh` of one axis (shard) or two (replicate, shard).
    """
    if isinstance(mesh, Mesh):
        return mesh
    device = device or default_device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if not dist.is_initialized():
        return _lone_mesh(config, device)
    world = dist.get_world_size()
    first = all(key[0] is not dist.group.WORLD for key in _MESHES)
    if first:
        compare(config)
    shard_size = _shard_size(config, world) if mesh is None else mesh.mesh.shape[-1]
    per_node = node_size(config, shard_size, _local_size(config, world))
    key = (dist.group.WORLD, shard_size, per_node, device, config.timeout, mesh)
    if key not in _MESHES:
        if not first:
            compare(config)
        timeout = timedelta(seconds=config.timeout) if config.timeout else None
        if mesh is None:
            _MESHES[key] = _make_mesh(world, shard_size, per_node, device, timeout)
        else:
            _MESHES[key] = _from_device_mesh(mesh, per_node, device, timeout)
    return _MESHES[key]


def host_group(purpose: str, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks, one for each purpose; None where there is one rank.

    Collective the first time. Groups are never given back, so it is kept as long as the default group is the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    key = purpose, dist.group.WORLD
    if key not in _HOST_GROUPS:
        _HOST_GROUPS[key] = dist.new_group(backend="gloo", timeout=timeout)
    return _HOST_GROUPS[key]


def word_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for words before a mesh is there: the default one, if it is of gloo.

    That one tells at once where a rank has gone. One of NCCL alone would make a communicator on the device that is
    current, which need not be the one that the process trains on. Collective the first time.
    """
    speaks_gloo = "cpu:gloo" in dist.get_backend_config(None).split(",")
    return dist.group.WORLD if speaks_gloo else host_group("words")


def let_go(mesh: Mesh) -> None:
    """Drop a mesh's references to its process groups; it can't be used any more."""
    for axis in (mesh.shard, mesh.replicate, mesh.world, mesh.node, mesh.cross):
        object.__setattr__(axis, "group", None)
    object.__setattr__(mesh, "control", None)


def let_go_of_all() -> None:
    """Let go of all meshes and groups of this process."""
    for mesh in _MESHES.values():
        let_go(mesh)
    _MESHES.clear()
    _HOST_GROUPS.clear()
    _LOCAL_SIZES.clear()


def _shard_size(config: ShardConfig, world: int) -> int:
    size = config.shard_size
    if size is None:
        return world
    if size == "node":
        size = local_size(world)
    assert isinstance(size, int)
    if size > world or world % size:
        raise ValueError(
            f"shard_size: {config.shard_size!r} ({counted(size, 'rank')}) does not divide the world of "
            f"{counted(world, 'rank')}; use one of "
            f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}, or null for all."
        )
    return size


def local_size(world: int) -> int:
    """Return the ranks that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _local_size(config: ShardConfig, world: int) -> int:
    """Return `local_size`; where the mesh depends on it, collective the first time, and the same on all ranks."""
    communication = config.communication
    asked = _uses_nodes(config) and communication.node_size is None
    if not asked or config.secondary_shard_size is not None or world == 1:
        return local_size(world)
    key = dist.group.WORLD, local_size(world)
    if key not in _LOCAL_SIZES:
        _LOCAL_SIZES[key] = [0] * world
        dist.all_gather_object(_LOCAL_SIZES[key], local_size(world), group=word_group())
    sizes = _LOCAL_SIZES[key]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"communication: machines have different numbers of ranks ({min(sizes)} to {max(sizes)}); set "
            "communication.node_size to the ranks that exchange among themselves before they do with others, or to 1 "
            "for a single hop (then without two_hop_gathers)."
        )
    return sizes[0]


def _uses_nodes(config: ShardConfig) -> bool:
    """Say whether anything but a secondary shard tells the ranks of a node from the others."""
    return config.communication.gradients is not Codec.NONE or config.communication.two_hop_gathers


def gathers_in_two_hops(config: ShardConfig, node: int, cross: int) -> bool:
    """Say whether gathers go over `cross` and then `node`, axes of these sizes: Note [Two-hop gathers]."""
    return config.communication.two_hop_gathers and node > 1 and cross > 1


def first_hop(local: int, shard_size: int) -> int:
    """Return the ranks of `shard` in one of several nodes of `local` ranks; 1 where it does not cut into nodes."""
    return local if local < shard_size and shard_size % local == 0 else 1


def node_size(config: ShardConfig, shard_size: int, local: int) -> int:
    """Return the ranks of the axis `node`, 1 where nothing uses it; a node has `local` of all ranks.

    It is the secondary shard's where there is one; else coded gradients and gathers in two hops have use of it, where
    `shard` leaves the node.
    """
    if config.secondary_shard_size is not None:
        return _secondary_size(config.secondary_shard_size, shard_size)
    if not _uses_nodes(config):
        return 1
    size = config.communication.node_size
    if size is None:
        return first_hop(local, shard_size)
    if shard_size % size:
        raise ValueError(
            f"communication.node_size: {size} does not divide the shard size of {counted(shard_size, 'rank')}; use "
            f"{' or '.join(str(n) for n in range(1, shard_size + 1) if shard_size % n == 0)}, or leave it out."
        )
    return size if size < shard_size else 1


def _secondary_size(size: int, shard_size: int) -> int:
    if size >= shard_size or shard_size % size:
        why = "is the shard itself" if size == shard_size else "does not divide it"
        divisors = " or ".join(str(n) for n in range(2, shard_size) if shard_size % n == 0)
        raise ValueError(
            f"secondary_shard_size: the shard size is {counted(shard_size, 'rank')}, and a secondary shard over {size} "
            f"{why}; {f'use {divisors}, or ' if divisors else ''}leave it out."
        )
    return size


def _lone_mesh(config: ShardConfig, device: torch.device) -> Mesh:
    node_size(config, _shard_size(config, 1), 1)
    one = [Axis(name, 1, 0, None) for name in ("shard", "replicate", "world")]
    return Mesh(one[0], one[1], one[2], None, device)


def _make_axis(name: str, parts: list[list[int]], timeout: timedelta | None) -> Axis:
    """Make the groups of one axis (collective over the world) and return this rank's."""
    rank = dist.get_rank()
    mine = next(part for part in parts if rank in part)
    group = None
    if len(mine) > 1:
        group, _ = dist.new_subgroups_by_enumeration(parts, timeout=timeout)
    return Axis(name, len(mine), mine.index(rank), group)


def _make_control(timeout: timedelta | None) -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None


def _make_mesh(world: int, shard_size: int, per_node: int, device: torch.device, timeout: timedelta | None) -> Mesh:
    copies = [list(range(start, start + shard_size)) for start in range(0, world, shard_size)]
    shard = _make_axis("shard", copies, timeout)
    replicate = _make_axis("replicate", [list(range(k, world, shard_size)) for k in range(shard_size)], timeout)
    whole = Axis("world", world, dist.get_rank(), dist.group.WORLD if world > 1 else None)
    node, cross = _make_node(copies, per_node, timeout)
    return Mesh(shard, replicate, whole, _make_control(timeout), device, node, cross, _world_parts(copies))


def _world_parts(copies: list[list[int]]) -> tuple[int, ...]:
    """Number the ranks so that those which have one place in each list of `copies` follow each other."""
    order = [rank for counterparts in zip(*copies, strict=True) for rank in counterparts]
    return tuple(order.index(rank) for rank in range(len(order)))


def _make_node(copies: list[list[int]], size: int, timeout: timedelta | None) -> tuple[Axis, Axis]:
    """Make the axes `node`, of `size` neighbours in each list of ranks that share a copy, and `cross`.

    Collective over the world.
    """
    if size == 1:
        return Axis("node", 1, 0, None), Axis("cross", 1, 0, None)
    near = [copy[k : k + size] for copy in copies for k in range(0, len(copy), size)]
    far = [copy[k::size] for copy in copies for k in range(size)]
    return _make_axis("node", near, timeout), _make_axis("cross", far, timeout)


def _from_device_mesh(mesh: DeviceMesh, per_node: int, device: torch.device, timeout: timedelta | None) -> Mesh:
    if mesh.ndim > 2:
        raise ValueError(f"mesh: {mesh.ndim} axes given; use one (shard) or two (replicate, shard).")
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh: has {counted(mesh.size(), 'rank')}, the world {dist.get_world_size()}; give a mesh over all ranks."
        )

    def axis(name: str, index: int) -> Axis:
        size = mesh.size(index)
        return Axis(name, size, mesh.get_local_rank(index), mesh.get_group(index) if size > 1 else None)

    lone = Axis("replicate", 1, 0, None)
    world = dist.get_world_size()
    whole = Axis("world", world, dist.get_rank(), dist.group.WORLD if world > 1 else None)
    replicate = axis("replicate", 0) if mesh.ndim == 2 else lone
    copies = mesh.mesh.view(-1, mesh.size(-1)).tolist()
    node, cross = _make_node(copies, per_node, timeout)
    shard = axis("shard", mesh.ndim - 1)
    return Mesh(shard, replicate, whole, _make_control(None), device, node, cross, _world_parts(copies))
