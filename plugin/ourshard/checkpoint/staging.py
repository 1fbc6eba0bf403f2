"""Host memory that a background save reads while training changes the tensors it was copied from."""

from __future__ import annotations

from collections.abc import Callable

import torch

ToHost = Callable[[torch.Tensor], torch.Tensor]

CHUNK_NBYTES = 64 << 20  # small tensors share one; a power of two, since pinned allocations are rounded up to one
_ALIGNMENT = 64


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values, contiguous, on the CPU; itself where it is that already."""
    return tensor.detach().cpu().contiguous()


class Staging:
    """Copies of tensors in host memory that is allocated once, at the first save, and used again by the next ones.

    On CUDA it is pinned, and the copies run on a stream of their own. Only one save may use it at a time.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._chunk = self._used = 0
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Count the bytes of host memory that are held."""
        return sum(chunk.numel() for chunk in self._chunks)

    def begin(self) -> None:
        """Forget the copies of the save before."""
        self._chunk = self._used = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU; one of a CUDA tensor has its values when `finish` has been waited for."""
        tensor = tensor.detach()
        nbytes = tensor.numel() * tensor.itemsize
        place = self._take(nbytes).view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return place.copy_(tensor)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))  # the last step's values
        with torch.cuda.stream(self._stream):
            place.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # a temporary may be freed before it is copied
        return place

    def finish(self) -> Callable[[], None]:
        """Hold back later work of the device until the copies are done; return what a thread calls to wait for them."""
        if self._stream is None:
            return lambda: None
        done = self._stream.record_event()
        torch.cuda.current_stream(self._stream.device).wait_event(done)  # the next step changes what is copied
        return done.synchronize

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return free bytes, in the first chunk from the current one on that has as many."""
        while True:
            if self._chunk == len(self._chunks):
                pinned = torch.cuda.is_available()
                self._chunks.append(torch.empty(max(nbytes, CHUNK_NBYTES), dtype=torch.uint8, pin_memory=pinned))
            chunk = self._chunks[self._chunk]
            if self._used + nbytes <= chunk.numel():
                start = self._used
                self._used = -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
                return chunk[start : start + nbytes]
            self._chunk, self._used = self._chunk + 1, 0
