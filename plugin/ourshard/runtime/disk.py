"""What the runtime asks of a disk on which masters, optimizer state or parameters rest. `ourshard.offload` answers."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.optim import Optimizer

BLOCK = max(4096, mmap.ALLOCATIONGRANULARITY)  # what is taken of a file, and of a window, is whole blocks

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes of one rank that are to rest on a disk."""

    masters: int  # that are stepped; an optimizer keeps its state beside them
    shards: int  # of parameters
    tensors: int  # each is on blocks of its own

    @property
    def nbytes(self) -> int:
        """Return what is there before the first step."""
        return self.masters + self.shards

    @property
    def reserved(self) -> int:
        """Return what to take before the model is sharded, so that nothing is missing while it is."""
        return self.nbytes + self.tensors * BLOCK

    def with_states(self, count: int) -> int:
        """Return what is there with an optimizer that keeps `count` values beside each master."""
        return (1 + count) * self.masters + self.shards


def padded(nbytes: int) -> int:
    """Round up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class ShardWindows(Protocol):
    """Windows of host memory through which shards of parameters pass between the disk and the device.

    None of these raises where the disk fails: it is noted in `failure`, for `Disk.agree`.
    """

    failure: str | None

    def add(self, lane: Lane, resting: torch.Tensor) -> None:
        """Let what gathers of a lane start from, a tensor that `Disk.take` gave, pass through the windows."""

    def fetch(self, lane: Lane) -> torch.Tensor:
        """Return it in host memory, to be used until `done`."""

    def done(self, lane: Lane, event: Any) -> None:
        """Say that `event` is recorded after the last use of what `fetch` returned."""

    def read_ahead(self, lanes: Sequence[Lane]) -> None:
        """Begin to read what is wanted next."""

    def store(self, lane: Lane, values: torch.Tensor) -> None:
        """Begin to write new values, of any dtype."""

    def forget(self, lane: Lane) -> None:
        """Note that it was written to, or is about to be, where it rests."""


class Disk(Protocol):
    """The disk of one engine on one rank.

    What rests there can be read and written through the tensors that `take` gives, by page faults, in no hurry: saves,
    loads and whole values do. A step takes the way of `bring`.
    """

    nbytes: int  # taken
    shards: ShardWindows

    def take(self, numel: int, dtype: torch.dtype, *, stepped: bool = False) -> torch.Tensor:
        """Return a zeroed tensor on the CPU whose elements are in the file; `stepped`: `bring` will yield it."""

    def check(self) -> None:
        """Raise RuntimeError where what rests there is lost; local."""

    def agree(self, label: str) -> None:
        """Raise RuntimeError on all ranks where reading or writing parameters failed on any. Collective."""

    def raise_failure(self) -> None:
        """Raise it, where the ranks know that one failed. Collective."""

    def bring(
        self, optimizer: Optimizer, lanes: Sequence[Lane], *, together: bool = False
    ) -> Generator[tuple[Lane, torch.Tensor], None, None]:
        """Yield each lane, with its master, while the optimizer's runs and states of it are in host memory.

        Reads ahead and writes behind. Collective at its end, where any rank's failure is raised on all; with `together`
        at each lane, so that no rank's caller waits in a collective for one that failed.
        """

    def put_away(self, optimizer: Optimizer, lane: Lane) -> None:
        """Move the state that an optimizer has of a lane to the disk; local."""


def open_disk(engine: Engine, need: DiskNeed) -> Disk:
    """Check the disk at `nvme_path` and open this rank's file there. Collective; raises `ValueError` on all ranks."""
    # By name, as this layer knows nothing of the one above, and as a run without a disk needs none of it.
    return cast(Disk, importlib.import_module("ourshard.offload.disk").open_disk(engine, need))
