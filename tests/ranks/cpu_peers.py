"""Peer copies between processes on a CPU: memory that peers map is a file, kernels are what they compute, in torch."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

KERNELS = "ourshard.runtime.peer_kernels"


class _Handle:
    """What `rendezvous` of symmetric memory returns: every rank's buffer, and barriers."""

    def __init__(self, buffers: list[torch.Tensor], group: Any) -> None:
        self._buffers = buffers
        self._group = group

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers[rank].view(dtype).view(sizes)

    def barrier(self, channel: int = 0) -> None:
        dist.barrier(self._group)


def _rendezvous(mine: torch.Tensor, group: Any) -> _Handle:
    rank = dist.get_rank(group)
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders, group_src=0, group=group)
    paths = [str(Path(folders[0]) / str(other)) for other in range(dist.get_world_size(group))]
    maps = [torch.from_file(path, shared=True, size=mine.numel(), dtype=torch.uint8) for path in paths]
    mine.set_(maps[rank].untyped_storage(), 0, mine.shape, (1,))
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(folders[0])  # what is mapped stays
    return _Handle(maps, group)


def add_parts(  # what the kernel computes
    out: torch.Tensor, norms: torch.Tensor, own: torch.Tensor, pulled: torch.Tensor, divisor: int, *, add: bool
) -> None:
    from ourshard.runtime.peer import BLOCK

    total = own.float()
    for part in pulled.view(-1, own.numel()):
        total = total + part.float()
    total = total * (1.0 / divisor)
    out.copy_(total + out.float() if add else total)
    blocks = F.pad(out.float(), (0, -out.numel() % BLOCK)).view(-1, BLOCK)
    norms[: len(blocks)] = torch.linalg.vector_norm(blocks, dim=1)


def copy_twice(source: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    first.copy_(source)
    second.copy_(source)


def _make(engine: Any) -> Any:
    from ourshard.runtime import peer

    axis = engine.mesh.shard
    if axis.size == 1:
        return "one rank has a whole copy"
    staging, arena = peer._sizes(engine.units)
    return peer.PeerCopies(axis, engine.mesh.device, staging, arena, engine.reducer.divisor(axis))


@contextlib.contextmanager
def peers_on_cpu() -> Iterator[Any]:
    """Let models that are sharded in here gather and reduce by peer copies; yields the kernels, as mocks."""
    from ourshard.runtime import build
    from torch.distributed import _symmetric_memory as symmetric

    kernels = mock.Mock(ModuleType(KERNELS), add_parts=mock.Mock(wraps=add_parts))
    kernels.copy_twice = mock.Mock(wraps=copy_twice)
    with (
        mock.patch.object(symmetric, "empty", lambda *size, dtype, device: torch.empty(*size, dtype=dtype)),
        mock.patch.object(symmetric, "rendezvous", _rendezvous),
        mock.patch.object(build, "make_peer_copies", _make),
        mock.patch.dict(sys.modules, {KERNELS: kernels}),
    ):
        yield kernels
