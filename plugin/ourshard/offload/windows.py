"""Windows of host memory through which lanes pass when the optimizer steps them.

Note [Windows]
--------------
A step needs, of one lane at a time, the master and what the optimizer keeps one value an element of: its columns. Each
window has a buffer for each column, as long as the longest lane. There are three windows, or what `offload.windows`
says: while the CPU steps the lane in one, the next lane is read into the second, and the lane before is written from
the third (and its master goes up to the device). For the time in which a lane is in a window the optimizer's tensors
are views of it; at rest they are views of the file.

A state tensor that is not (it was made in this step, loaded, or cut in two) is copied into the window, and is a view of
the file from then on.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ourshard.runtime.disk import padded
from ourshard.runtime.lane import Lane
from ourshard.runtime.states import Column, states_of

if TYPE_CHECKING:
    from ourshard.offload.disk import LaneFile


@dataclass(slots=True)
class Window:
    """Buffers by column, what is on its way into or out of them, and the event after which the master is above."""

    buffers: dict[Column, torch.Tensor] = field(default_factory=dict)  # bytes
    moving: list[Future[None]] = field(default_factory=list)
    sent: Any = None

    def wait(self) -> None:
        """Return when nothing reads or writes the buffers; raises what the threads raised."""
        moving, self.moving = self.moving, []
        try:
            for future in moving:
                future.result()
        finally:
            for future in moving:  # after a failure too: the buffers are used again, or freed
                future.exception()
            if self.sent is not None:
                self.sent.synchronize()
                self.sent = None


class Transit:
    """One lane on its way through a window during one step: `begin`, `enter`, `leave`. Note [Windows]."""

    def __init__(self, file: LaneFile, optimizer: Optimizer) -> None:
        self.lane: Lane = file.lane
        self._file = file
        self._optimizer = optimizer
        self._runs = [run for run in file.lane.runs if run.optimizer() is optimizer and run.stop > run.start]
        self._window: Window | None = None

    def begin(self, window: Window) -> None:
        """Begin to read all that the file has of the lane."""
        self._window = window
        for column, start in self._file.starts.items():
            window.moving += self._file.disk.file.read(start, self._bytes(column))

    def enter(self) -> torch.Tensor:
        """Wait for it, and let the optimizer's tensors be in the window. Returns the master."""
        assert self._window is not None
        self._window.wait()
        master = self._flat(self._file.master)
        for run in self._runs:
            run.parameter.data = master[run.start : run.stop]
            for column, value in states_of(self._optimizer, run):
                place = self._flat(column)[run.start : run.stop]
                if not self._file.has(column, run, value):
                    place.copy_(value)
                self._optimizer.state[run.parameter][column.name] = place
        return master

    def leave(self) -> None:
        """Let the optimizer's tensors be in the file, and begin to write what is in the window there."""
        assert self._window is not None
        for run in self._runs:
            run.parameter.data = self.lane.master[run.start : run.stop]
            for column, value in states_of(self._optimizer, run):
                place = self._flat(column)[run.start : run.stop]
                if value.data_ptr() != place.data_ptr():  # made in this step
                    place.copy_(value)
                self._optimizer.state[run.parameter][column.name] = self._file.rows(column, run)
        for column, start in self._file.starts.items():
            self._window.moving += self._file.disk.file.write(start, self._bytes(column))

    def _bytes(self, column: Column) -> torch.Tensor:
        """Return the buffer of a column, in whole blocks of this lane's length."""
        assert self._window is not None
        nbytes = self.lane.layout.shard_numel * column.dtype.itemsize
        if column not in self._window.buffers:
            self._window.buffers[column] = self._file.disk.take_buffer(column)
        return self._window.buffers[column][: padded(nbytes)]

    def _flat(self, column: Column) -> torch.Tensor:
        numel = self.lane.layout.shard_numel
        return self._bytes(column)[: numel * column.dtype.itemsize].view(column.dtype)
