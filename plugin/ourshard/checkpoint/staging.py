"""Host memory that a background save reads while training changes the tensors it was copied from.

Note [Staging memory]: the first save goes over its tensors twice. The first time it counts their bytes, and takes one
block of exactly as many, page-aligned and registered with the driver (torch's own pinned memory is rounded up to a
power of two); the second time it copies. Later saves copy at once into the same block. What does not fit any more, as
an optimizer's state that was not there before, goes into blocks of its own, and the next save counts again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ourshard.runtime.host import HostMemory

ToHost = Callable[[torch.Tensor], torch.Tensor]
Taken = TypeVar("Taken")

_ALIGNMENT = 64


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values, contiguous, on the CPU; itself where it is that already."""
    return tensor.detach().cpu().contiguous()


class Staging:
    """Copies of tensors in host memory that is taken at the first save and used again by the next ones.

    On CUDA it is pinned, and the copies run on a stream of their own. Only one save may use it at a time.
    """

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0
        self._fits = False  # the block held all of the last save
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Count the bytes of host memory that are held."""
        return self._memory.nbytes if self._memory is not None else 0

    @property
    def pinned_nbytes(self) -> int:
        """Count those of them that the driver has pinned."""
        return self._memory.pinned_nbytes if self._memory is not None else 0

    def copy(self, device: torch.device, take: Callable[[ToHost], Taken]) -> Taken:
        """Return what `take` makes of its tensors, each as a copy on the CPU; the copies of the save before are lost.

        `take` may be called twice. Copies from CUDA have their values when `finish` has been waited for.
        """
        if not self._fits:
            counter = _Counter()
            take(counter.to_host)
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = HostMemory(device, pin=True, user="checkpoint.asynchronous", advice="")
            self._block = self._memory.take(counter.nbytes, torch.uint8)
        self._used, self._fits = 0, True
        return take(self._to_host)

    def finish(self) -> Callable[[], None]:
        """Hold back later work of the device until the copies are done; return what a thread calls to wait for them."""
        if self._stream is None:
            return lambda: None
        done = self._stream.record_event()
        torch.cuda.current_stream(self._stream.device).wait_event(done)  # the next step changes what is copied
        return done.synchronize

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        place = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return place.copy_(tensor)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))  # the last step's values
        with torch.cuda.stream(self._stream):
            place.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # a temporary may be freed before it is copied
        return place

    def _take(self, nbytes: int) -> torch.Tensor:
        assert self._memory is not None, "taken before `copy`"
        start = self._used
        if start + nbytes > self._block.numel():
            self._fits = False
            return self._memory.take(nbytes, torch.uint8)
        self._used = start + _aligned(nbytes)
        return self._block[start : start + nbytes]


class _Counter:
    """Counts what is to be staged; what it returns has the shape of a copy and no values."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.nbytes += _aligned(tensor.nbytes)
        if self._scratch.numel() < tensor.nbytes:
            self._scratch = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
        return self._scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
