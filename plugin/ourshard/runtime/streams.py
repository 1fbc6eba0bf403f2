"""Streams and the edges between them. Every cross-stream edge of the runtime is one call in this file.

Note [Streams]
--------------
Four streams: the caller's (compute), gather, reduce and, where inputs of units are offloaded, copies. All buffers are
allocated and freed on the compute stream, so the caching allocator reuses a freed block only for work that is queued
later on that stream, and:

* a gather waits for the compute stream as it is when the gather is issued (`gather`): the block it fills was
  freed by work queued before, and the masters it reads were stepped there;
* compute waits for the gather of a unit before its first kernel (`wait`);
* copies wait for compute as gathers do; what they read or fill is kept alive until compute has waited for them;
* a reduction waits for compute, which filled its buffer (`reduce`), and its buffer is kept alive by the
  runtime until compute has waited for it (`wait`, `join`): no `record_stream`.

On a CPU all work is synchronous and every edge is empty.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ourshard.runtime.meter import Meter, Spent

END = "the end of backward"


class Queue:
    """A stream that work is put on in a `with` block; on a CPU it is the only one."""

    __slots__ = ()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def mark(self, event: Any) -> Any:
        """Record an event behind the work so far, in place of an earlier one if given, and return it; None on a CPU."""
        return None


def _make_current(stream: torch.cuda.Stream) -> None:
    """Do what `torch.cuda.set_stream` does in three calls."""
    torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)


def _event() -> Any:
    """Return a new event: of the class below `torch.cuda.Event`, which puts a method of Python around each call."""
    return torch._C._CudaEventBase()


class _Current:
    """The stream that is current on a device: of torch a question costs more than of this, since it makes an object."""

    __slots__ = ("_device", "_known")

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def stream(self) -> torch.cuda.Stream:
        where = torch._C._cuda_getCurrentStream(self._device)
        found = self._known.get(where)
        if found is None:
            found = self._known[where] = torch.cuda.current_stream(self._device)
        return found


class _After(Queue):
    """Queue on a stream, after the work that the current one has so far. One event serves all waits of a stream.

    A step enters it three times for a unit, so that what torch's own context managers ask again each time is kept.
    """

    __slots__ = ("_before", "_current", "_event", "_stream")

    def __init__(self, stream: torch.cuda.Stream, current: _Current) -> None:
        self._stream = stream
        self._current = current
        self._event = _event()
        self._before: torch.cuda.Stream | None = None

    def __enter__(self) -> _After:
        assert self._before is None, "entered twice"
        self._before = self._current.stream()
        self._event.record(self._before)
        self._event.wait(self._stream)
        _make_current(self._stream)
        return self

    def mark(self, event: Any) -> Any:
        event = event or _event()
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait on the host until the stream has done all of its work."""
        self._stream.synchronize()

    def __exit__(self, *exception: object) -> None:
        assert self._before is not None
        _make_current(self._before)
        self._before = None


class Streams:
    """The gather and reduce streams of a device; no-ops on a CPU.

    Attributes: `gather` and `reduce` queue on one of them, after the compute stream's work so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.meter: Meter | None = None  # the engine's, while it measures
        self.gather = self.reduce = Queue()
        self._copies: _After | None = None
        self._device = device
        if self.on_gpu:
            self._gather = torch.cuda.Stream(device, priority=-1)
            self._reduce = torch.cuda.Stream(device, priority=-1)
            self._current = _Current(device)
            self.gather = _After(self._gather, self._current)
            self.reduce = _After(self._reduce, self._current)

    def copies(self) -> Queue:
        """Queue on the stream of copies to the host and back, after the compute stream's work so far."""
        if not self.on_gpu:
            return self.gather
        if self._copies is None:
            self._copies = _After(torch.cuda.Stream(self._device, priority=-1), self._current)
        return self._copies

    def beside_compute(self) -> bool:
        """Say whether the current stream is the one of gathers or of reductions."""
        return self._current.stream() in (self._gather, self._reduce)

    def wait(self, event: Any, kind: Spent, label: str) -> None:
        """Make the current stream wait for `event`; a meter is told as what, and of which unit."""
        if event is None:
            return
        if self.meter is None:
            event.wait(self._current.stream())
            return
        with self._measured(kind, label):
            event.wait(self._current.stream())

    def _measured(self, kind: Spent, label: str) -> AbstractContextManager[None]:
        return nullcontext() if self.meter is None else self.meter.span(kind, label)

    def land(self) -> None:
        """Wait on the host until what was copied from it and to it has arrived."""
        if self.on_gpu:
            self._gather.synchronize()
            self._reduce.synchronize()
            if self._copies is not None:
                self._copies.synchronize()

    def fork(self) -> None:
        """Make gathers and reductions wait for the compute stream, so that a capture of it takes in all three."""
        for queue in (self.gather, self.reduce):
            with queue:
                pass

    def join(self) -> None:
        """Make the compute stream wait for all gathers and reductions issued so far."""
        if not self.on_gpu:
            return
        current = self._current.stream()
        with self._measured(Spent.GATHER, END):
            current.wait_stream(self._gather)
        with self._measured(Spent.REDUCE, END):
            current.wait_stream(self._reduce)


def profiler_range(name: str) -> Any:
    """Return a `torch.profiler` range labelled with unit and phase; free while no profiler runs."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
