"""Host memory for offloaded lanes and staged saves: page-aligned, of exact size, pinned where it can be.

Note [Masters on the host]
--------------------------
With `offload.optimizer: cpu` the master and the reduced gradient of a trainable sharded lane live here, each taken
once. The optimizer steps them with torch's CPU kernels. A reduced gradient comes down on the reduce stream while
backward still runs; the end of backward waits on the host until the last one has landed. A lane's master goes up once
a step, on the gather stream, while the CPU steps the next lane (Note [Steps by lane] in lane_step.py), or right before
its first gather; the device casts it to the compute dtype. With `offload.params: cpu` the shard in compute dtype comes
back down and stays here, and goes up before every gather, as do the stored shards of frozen lanes. The device casts for
it too: a cast on the host goes through 8 bytes of its memory an element, beside the 28 of AdamW.

With `offload.optimizer: nvme` gradients are here, and masters with the optimizer's state are in a file: they pass
through host memory in a step, lane by lane (disk.py). The shard in compute dtype rests where `offload.params` says.

What the optimizer keeps one value an element of has memory of the same kind, not pinned, as it never travels: it moves
there after the first step of a lane (states.py).

torch's own pinned memory is rounded up to a power of two; here plain memory is registered with the driver instead.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import weakref

import torch

from ourshard.config import OffloadConfig
from ourshard.runtime.wording import memory_text

logger = logging.getLogger("ourshard")

_PAGE = 4096
_HUGE = 2 * 2**20


class PinBudget:
    """The bytes that a rank may still pin for offload: `offload.max_pinned`."""

    def __init__(self, nbytes: int | None) -> None:
        self.left = math.inf if nbytes is None else nbytes


class HostMemory:
    """Makes host buffers, which stay pinned as long as it lives. On a machine without CUDA nothing is pinned.

    `user` and `advice` are for the warning where the system refuses to pin: whose memory it is, and what else to do.
    """

    def __init__(
        self,
        device: torch.device,
        pin: bool,
        budget: PinBudget | None = None,
        *,
        user: str = "offload",
        advice: str = ", or set offload.pin_memory to false",
    ) -> None:
        self.nbytes = 0  # taken
        self.pinned_nbytes = 0
        self._device = device
        self._pin = pin and device.type == "cuda"
        self._budget = budget or PinBudget(None)
        self._user, self._advice = user, advice
        self._registered: list[torch.Tensor] = []
        weakref.finalize(self, _unregister, self._registered).atexit = False

    def take(self, numel: int, dtype: torch.dtype, *, travels: bool = True) -> torch.Tensor:
        """Return a zeroed buffer of `numel` elements that starts on a page.

        It is pinned, unless it never `travels` to the device or from it, or is more than may still be pinned.
        """
        nbytes = numel * dtype.itemsize
        buffer = _zeros(nbytes)
        self.nbytes += nbytes
        if self._pin and travels and 0 < nbytes <= self._budget.left:
            self._register(buffer)
        return buffer.view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let go of what `take` returned as bytes, once no copy uses it."""
        self.nbytes -= buffer.nbytes
        for index, pinned in enumerate(self._registered):
            if pinned.data_ptr() == buffer.data_ptr():
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
                self.pinned_nbytes -= buffer.nbytes
                self._budget.left += buffer.nbytes
                del self._registered[index]
                return

    def _register(self, buffer: torch.Tensor) -> None:
        buffer[::_PAGE] = 0  # takes the pages, huge ones at once: the driver would take them three times as slowly
        code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        if int(code) == 0:
            self._registered.append(buffer)
            self.pinned_nbytes += buffer.nbytes
            self._budget.left -= buffer.nbytes
            return
        self._pin = False
        _forget_error(self._device)
        logger.warning(
            "%s: the system refused to pin %s of host memory (CUDA error %d, after %s); going on with "
            "pageable memory, which copies slower. Raise `ulimit -l`%s.",
            self._user,
            memory_text(buffer.nbytes),
            int(code),
            memory_text(self.pinned_nbytes),
            self._advice,
        )


def memory_for_offload(offload: OffloadConfig, device: torch.device, budget: PinBudget) -> HostMemory | None:
    """Return what makes an engine's host buffers; None where nothing is offloaded."""
    if not offload.active:
        return None
    if device.type == "cuda":
        _warn_of_idle_cores()
    return HostMemory(device, offload.pin_memory, budget)


def _zeros(nbytes: int) -> torch.Tensor:
    """Return bytes fresh from the system: zero, on a page, and in memory only once they are touched.

    From `_HUGE` on they start on a huge page, and whole huge pages are asked for: AdamW goes through seven streams.
    """
    huge = nbytes >= 2 * _HUGE
    length = nbytes + (_HUGE if huge else 0)
    memory = mmap.mmap(-1, max(length, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(memory, dtype=torch.uint8)
    start = -base.data_ptr() % _HUGE if huge else 0
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE * _HUGE)
    return base[start : start + nbytes]


def _warn_of_idle_cores() -> None:
    """Say, once a machine, that the optimizer's step would leave most cores idle."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = torch.get_num_threads()
    if 2 * threads <= cores and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "offload: the optimizer steps on the host with %d of about %d cores a rank (torchrun sets "
            "OMP_NUM_THREADS=1); set OMP_NUM_THREADS=%d, or call torch.set_num_threads.",
            threads,
            cores,
            cores,
        )


def _forget_error(device: torch.device) -> None:
    """Read the driver's last error, so that it is not taken for one of the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _unregister(buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    buffers.clear()
