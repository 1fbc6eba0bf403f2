"""What the runtime asks of a disk on which masters and optimizer state rest. `ourshard.offload` answers it."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch.optim import Optimizer

BLOCK = max(4096, mmap.ALLOCATIONGRANULARITY)  # what is taken of a file, and of a window, is whole blocks
WINDOWS = 3  # parts of host memory that lanes pass through: one is read, one is stepped, one is written

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane


def padded(nbytes: int) -> int:
    """Round up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Disk(Protocol):
    """The disk of one engine on one rank.

    What rests there can be read and written through the tensors that `take` gives, by page faults, in no hurry: saves,
    loads and whole values do. A step takes the way of `bring`.
    """

    nbytes: int  # taken

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor on the CPU whose elements are in the file."""

    def check(self) -> None:
        """Raise RuntimeError where what rests there is lost; local."""

    def bring(self, optimizer: Optimizer, lanes: Sequence[Lane]) -> Iterator[tuple[Lane, torch.Tensor]]:
        """Yield each lane, with its master, while the optimizer's runs and states of it are in host memory.

        Reads ahead and writes behind. Collective at its end, where any rank's failure is raised on all.
        """

    def put_away(self, optimizer: Optimizer, lane: Lane) -> None:
        """Move the state that an optimizer has of a lane to the disk; local."""


def open_disk(engine: Engine, masters_nbytes: int) -> Disk:
    """Check the disk at `nvme_path` and open this rank's file there. Collective; raises `ValueError` on all ranks.

    `masters_nbytes`: what this rank's masters need.
    """
    # By name, as this layer knows nothing of the one above, and as a run without a disk needs none of it.
    return cast(Disk, importlib.import_module("ourshard.offload.disk").open_disk(engine, masters_nbytes))
