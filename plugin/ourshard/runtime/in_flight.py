"""What reductions under way read, and the buffers that the next ones fill."""

from __future__ import annotations

from typing import Any

import torch

from ourshard.runtime.lane_views import Pattern, Views
from ourshard.runtime.meter import Spent
from ourshard.runtime.streams import Streams


class InFlight:
    """The gradients that the reduce stream reads, kept alive until it has, and whole buffers that it is done with.

    Such buffers are filled and read on the reduce stream alone, in order: the next reduction of a backward takes one
    without a wait, and one of each size is enough for all.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._read: list[tuple[list[torch.Tensor], Any, str]] = []  # tensors, event, unit's label
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        # By what is viewed: a view keeps its memory, so that an address and a dtype mean one buffer until `forget`.
        self._views: dict[tuple[int, torch.dtype, Pattern], Views] = {}

    def keep(self, read: list[torch.Tensor], event: Any, label: str) -> None:
        """Keep tensors alive that the reduce stream reads; at most two units' worth, as prefetch does with slots."""
        if event is None:
            return
        self._read.append((read, event, label))
        while len(self._read) > 2:
            _, passed, whose = self._read.pop(0)
            self._streams.wait(passed, Spent.REDUCE, whose)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a buffer of this size that an earlier reduction gave back, if there is one."""
        spare = self._spare.get((numel, dtype))
        return spare.pop() if spare else None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the next reduction fill a buffer, behind the work that the reduce stream has with it."""
        self._spare.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def views_of(self, buffer: torch.Tensor, pattern: Pattern) -> Views:
        """Return views of a buffer that will be given back; made once for all lanes of a backward that are alike."""
        key = buffer.data_ptr(), buffer.dtype, pattern
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = pattern.views_of(buffer)
        return views

    def forget(self) -> None:
        """Let go of everything, once the compute stream has waited for all reductions."""
        self._read.clear()
        self._spare.clear()
        self._views.clear()
