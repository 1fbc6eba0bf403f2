"""Shards of parameters on a disk: they come up through windows of host memory, ahead of their gathers.

Note [Parameters on a disk]
---------------------------
What gathers start from (the shard in compute dtype, or the stored shard of a frozen lane) rests in the file. A gather
finds it in a window: host memory as long as the longest such shard. When one is issued, those that come next in the
recorded order (schedule.py) begin to be read into the windows that are free; when a lane is stepped, its new values are
cast into a window and written from there. What a window has is good until it is taken for another lane, so that the
backward, which begins where the forward ended, finds the last ones without a read.

A read or write that fails is noted, and the run goes on with zeros until the ranks next tell each other something: at
the end of a backward that syncs, of a forward without gradients, of `gathered`, or of a step from the disk. All of them
raise there, with the words of the first rank that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ourshard.offload.file import DiskFile
from ourshard.runtime.disk import padded
from ourshard.runtime.lane import Lane


class _Window:
    """Host memory, the lane that it has, and what reads or writes it."""

    __slots__ = ("buffer", "lane", "moving", "reads", "sent", "used")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer  # bytes
        self.lane: Lane | None = None
        self.moving: list[Future[None]] = []
        self.reads = False  # it is `moving` into the window; else out of it
        self.sent: Any = None  # the event after which the device has what it was sent
        self.used = 0  # when, as a count of uses

    def is_free(self) -> bool:
        """Say whether another lane may take it without a wait."""
        return all(future.done() for future in self.moving) and (self.sent is None or self.sent.query())

    def wait(self) -> None:
        """Return when nothing reads or writes it; raises `OSError`."""
        moving, self.moving, self.reads = self.moving, [], False
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None
        failures = [future.exception() for future in moving]
        for failure in failures:
            if failure is not None:
                self.lane = None
                raise failure


class ParameterWindows:
    """The windows of one rank: Note [Parameters on a disk].

    `make` returns pinned bytes of a length, `start_of` the place in the file of a tensor over its mapping.
    """

    def __init__(
        self,
        file: DiskFile,
        most: int,
        make: Callable[[int], torch.Tensor],
        start_of: Callable[[torch.Tensor], int],
    ) -> None:
        self.failure: str | None = None  # what went wrong first, until the ranks have told each other
        self._file = file
        self._most = most
        self._make = make
        self._start_of = start_of
        self._places: dict[Lane, tuple[int, torch.Tensor]] = {}  # place in the file, and the tensor over its mapping
        self._windows: list[_Window] = []
        self._uses = 0

    def add(self, lane: Lane, resting: torch.Tensor) -> None:
        """Let a lane's shard, a tensor over the file's mapping, pass through the windows."""
        self.settle()
        self._windows.clear()  # their length is that of the longest shard
        self._places[lane] = self._start_of(resting), resting

    def fetch(self, lane: Lane) -> torch.Tensor:
        """Return the shard in host memory, to be used until `done`; zeros if it could not be read."""
        window = self._window_of(lane)
        try:
            if window is None:
                window = self._oldest()
                self._read(window, lane)
            if window.reads:
                window.wait()
        except OSError as problem:
            self._note(problem)
            assert window is not None
            window.lane = lane
            window.buffer.zero_()
        self._use(window)
        return self._view(window, lane)

    def done(self, lane: Lane, event: Any) -> None:
        """Say that `event` is recorded after the last use of what `fetch` returned."""
        window = self._window_of(lane)
        assert window is not None
        window.sent = event

    def read_ahead(self, lanes: Sequence[Lane]) -> None:
        """Begin to read what is wanted next into windows that are free and have nothing of it."""
        wanted = [lane for lane in lanes if lane in self._places][: self._most - 1]
        for lane in wanted:
            if self._window_of(lane) is not None:
                continue
            windows = self._all_windows()
            free = [each for each in windows if each.lane not in wanted and each.is_free()]
            if not free:
                return
            self._read(min(free, key=lambda each: each.used), lane)

    def store(self, lane: Lane, values: torch.Tensor) -> None:
        """Begin to write new values of the whole shard, of any dtype, on the host or the device."""
        window = self._window_of(lane) or self._oldest()
        try:
            self._wait(window)
            window.lane = lane
            self._view(window, lane).copy_(values)
            self._use(window)
            window.moving = self._file.write(self._places[lane][0], self._bytes(window, lane))
        except OSError as problem:
            self._note(problem)

    def forget(self, lane: Lane) -> None:
        """Note that the shard was written to where it rests: what a window has is old."""
        window = self._window_of(lane)
        if window is not None:
            self._wait(window)
            window.lane = None

    def settle(self) -> None:
        """Return when nothing is on its way: before the file is read or written through its mapping."""
        for window in self._windows:
            self._wait(window)

    def _wait(self, window: _Window) -> None:
        try:
            window.wait()
        except OSError as problem:
            self._note(problem)

    def _note(self, problem: OSError) -> None:
        self.failure = self.failure or str(problem)

    def _read(self, window: _Window, lane: Lane) -> None:
        self._wait(window)
        window.lane = lane
        self._use(window)
        window.reads = True
        window.moving = self._file.read(self._places[lane][0], self._bytes(window, lane))

    def _use(self, window: _Window) -> None:
        self._uses += 1
        window.used = self._uses

    def _window_of(self, lane: Lane) -> _Window | None:
        return next((window for window in self._windows if window.lane is lane), None)

    def _oldest(self) -> _Window:
        return min(self._all_windows(), key=lambda window: window.used)

    def _all_windows(self) -> list[_Window]:
        if not self._windows:
            longest = max(padded(tensor.nbytes) for _, tensor in self._places.values())
            self._windows = [_Window(self._make(longest)) for _ in range(min(self._most, len(self._places)))]
        return self._windows

    def _bytes(self, window: _Window, lane: Lane) -> torch.Tensor:
        return window.buffer[: padded(self._places[lane][1].nbytes)]

    def _view(self, window: _Window, lane: Lane) -> torch.Tensor:
        resting = self._places[lane][1]
        return window.buffer[: resting.nbytes].view(resting.dtype)
