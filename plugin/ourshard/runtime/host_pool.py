"""Host buffers that are used again and again, for tensors whose sizes change from step to step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ourshard.runtime.host import HostMemory
from ourshard.runtime.host_room import free_memory
from ourshard.runtime.ledger import Kind, Ledger
from ourshard.runtime.wording import memory_text


class HostPool:
    """Buffers of `memory`, taken when none that is free is large enough.

    A free one that was too small is let go for it. So there are never more buffers than were in use at once, none is
    larger than the largest tensor, and a batch that is longer than all before it is the last that takes memory.
    """

    def __init__(self, memory: HostMemory, land: Callable[[], None], ledger: Ledger | None) -> None:
        self._memory = memory
        self._land = land  # waits for all copies, before memory is let go
        self._ledger = ledger
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes.

        Raises:
            MemoryError: the machine, or the container, has not that much memory left.
        """
        enough = [index for index, buffer in enumerate(self._free) if buffer.nbytes >= nbytes]
        if enough:
            return self._free.pop(min(enough, key=lambda index: self._free[index].nbytes))
        if self._free:
            self._land()
            largest = max(range(len(self._free)), key=lambda index: self._free[index].nbytes)
            self._count(-self._free[largest].nbytes)
            self._memory.give_back(self._free.pop(largest))
        room = free_memory()
        if nbytes > room:
            raise MemoryError(
                f"offload.activations: cpu: the host has no room for another {memory_text(nbytes)} of inputs "
                f"({memory_text(room)} are free, this rank's inputs have {memory_text(self._memory.nbytes)}). "
                "Use a smaller batch, fewer ranks on this machine, or none."
            )
        self._count(nbytes)
        return self._memory.take(nbytes, torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the next one have a buffer, behind the copies that use it now."""
        self._free.append(buffer)

    def _count(self, nbytes: int) -> None:
        if self._ledger is not None:
            self._ledger.hold(Kind.INPUTS, nbytes)
