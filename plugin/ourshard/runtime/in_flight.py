"""What reductions under way read, and the buffers that the next ones fill."""

from __future__ import annotations

from typing import Any

import torch

from ourshard.runtime.buffer import Slot
from ourshard.runtime.lane_views import Pattern, Views
from ourshard.runtime.ledger import Kind
from ourshard.runtime.meter import Spent
from ourshard.runtime.streams import Streams


class _Buffer:
    """A slot for whole gradients, where it goes when it is given back, and the views of it that were made."""

    __slots__ = ("slot", "spare", "views", "zeroed")

    def __init__(self, slot: Slot, spare: list[_Buffer]) -> None:
        self.slot = slot
        self.spare = spare
        self.views: dict[Pattern, tuple[Views, Views]] = {}  # with the gaps, and without
        self.zeroed: Pattern | None = None  # whose gaps are zero


class InFlight:
    """The gradients that the reduce stream reads, kept alive until it has, and whole buffers that it is done with.

    Such buffers are filled and read on the reduce stream alone, in order: the next reduction of a backward takes one
    without a wait, and one of each size is enough for all. Between backwards they have no memory, and keep their views:
    Note [Stable storage] in buffer.py.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._read: list[tuple[list[torch.Tensor], Any, str]] = []  # tensors, event, unit's label
        self._buffers: dict[int, _Buffer] = {}  # by id of the tensor
        self._spare: dict[tuple[int, torch.dtype], list[_Buffer]] = {}

    def keep(self, read: list[torch.Tensor], event: Any, label: str) -> None:
        """Keep tensors alive that the reduce stream reads; at most two units' worth, as prefetch does with slots."""
        if event is None:
            return
        self._read.append((read, event, label))
        while len(self._read) > 2:
            _, passed, whose = self._read.pop(0)
            self._streams.wait(passed, Spent.REDUCE, whose)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer, one that an earlier reduction gave back if there is one; on the compute stream."""
        spare = self._spare.get((numel, dtype))
        if not spare:
            spare = self._spare.setdefault((numel, dtype), [])
            buffer = _Buffer(Slot(numel, dtype, device, Kind.REDUCE, None), spare)
            self._buffers[id(buffer.slot.tensor)] = buffer
            return buffer.slot.tensor
        slot = spare.pop().slot
        if not slot.allocated:
            slot.allocate()
        return slot.tensor

    def give_back(self, tensor: torch.Tensor, zeroed: Pattern | None = None) -> bool:
        """Let the next reduction fill a buffer, behind the work that the reduce stream has with it.

        `zeroed`: the gaps of this pattern were zero before the reduction, and so are their sums and means. Returns
        False for a tensor that did not come from `take`: the caller keeps it until the stream has passed.
        """
        buffer = self._buffers.get(id(tensor))
        if buffer is None:
            return False
        buffer.zeroed = zeroed
        buffer.spare.append(buffer)
        return True

    def views_of(self, tensor: torch.Tensor, pattern: Pattern) -> Views:
        """Return views of whole gradients, with the gaps that are still to be zeroed.

        Of a buffer that comes back they are made once, for all lanes that are alike.
        """
        buffer = self._buffers.get(id(tensor))
        if buffer is None:
            return pattern.views_of(tensor)
        known = buffer.views.get(pattern)
        if known is None:
            views = pattern.views_of(tensor)
            known = buffer.views[pattern] = views, views._replace(gaps=[])
        return known[buffer.zeroed is pattern]

    def forget(self) -> None:
        """Let go of all memory, once the compute stream has waited for all reductions."""
        self._read.clear()
        for spare in self._spare.values():
            spare.clear()
        for buffer in self._buffers.values():
            buffer.slot.free()
            buffer.zeroed = None
            buffer.spare.append(buffer)
