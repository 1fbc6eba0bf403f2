"""Streams and the edges between them. Every cross-stream edge of the runtime is one call in this file.

Note [Streams]
--------------
Three streams: the caller's (compute), gather and reduce. All buffers are allocated and freed on the compute
stream, so the caching allocator reuses a freed block only for work that is queued later on that stream, and:

* a gather waits for the compute stream as it is when the gather is issued (`before_gather`): the block it fills was
  freed by work queued before, and the masters it reads were stepped there;
* compute waits for the gather of a unit before its first kernel (`after_gather`);
* a reduction waits for compute, which filled its buffer (`before_reduce`), and its buffer is kept alive by the
  runtime until compute has waited for it (`after_reduce`): no `record_stream`.

On a CPU all work is synchronous and every edge is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


class Streams:
    """The gather and reduce streams of a device; no-ops on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._gather = torch.cuda.Stream(device, priority=-1)
            self._reduce = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Queue on the gather stream, after the compute stream's work so far."""
        if not self.on_gpu:
            yield
            return
        self._gather.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._gather):
            yield

    @contextmanager
    def reduce(self) -> Iterator[None]:
        """Queue on the reduce stream, after the compute stream's work so far."""
        if not self.on_gpu:
            yield
            return
        self._reduce.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reduce):
            yield

    def event(self) -> Any:
        """Record and return an event on the current stream; None on a CPU."""
        return torch.cuda.current_stream().record_event() if self.on_gpu else None

    def wait(self, event: Any) -> None:
        """Make the current stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def land(self) -> None:
        """Wait on the host until what was copied from it and to it has arrived."""
        if self.on_gpu:
            self._gather.synchronize()
            self._reduce.synchronize()

    def join(self) -> None:
        """Make the compute stream wait for all gathers and reductions issued so far."""
        if self.on_gpu:
            current = torch.cuda.current_stream()
            current.wait_stream(self._gather)
            current.wait_stream(self._reduce)


def profiler_range(name: str) -> Any:
    """Return a `torch.profiler` range labelled with unit and phase; free while no profiler runs."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
