"""The rates of the disk and of the optimizer on the host, measured."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ourshard.doctor.finding import Finding, Verdict
from ourshard.doctor.machine import idle_cores
from ourshard.planning.starts import start_seconds
from ourshard.runtime.wording import counted

_BLOCK = 8 * 2**20  # bytes of one request
_BLOCKS = 32
_SECONDS = 1.5  # most that one direction takes, but for its last request
_SLOW_DISK = 0.1e9  # bytes/s; a checkpoint of 100 GB would take over a quarter of an hour
_NUMEL = 16 * 2**20  # 256 MiB with gradient and state: more than a cache holds


def measure_disk(folder: Path) -> list[Finding]:
    """Write and read a file in `folder` past the page cache; through it where the file system has no O_DIRECT."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".ourshard-doctor-")
    os.close(handle)
    try:
        try:
            written, read = _rates(name, getattr(os, "O_DIRECT", 0))
            how = "O_DIRECT" if hasattr(os, "O_DIRECT") else "buffered"
        except OSError:
            written, read = _rates(name, 0)
            how = "buffered, the file system refuses O_DIRECT"
    finally:
        os.unlink(name)
    values = {"write_bytes_per_s": written, "read_bytes_per_s": read, "direct": how == "O_DIRECT"}
    text = f"writes {written / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s in {folder} ({how})"
    if written < _SLOW_DISK:
        fix = "Save to a local disk (--folder measures another), or set checkpoint.asynchronous: true."
        return [Finding("disk", text, Verdict.NOTE, fix, values)]
    return [Finding("disk", text, values=values)]


def _rates(name: str, flag: int) -> tuple[float, float]:
    """Return the bytes/s of writing (with fsync) and of reading back."""
    with mmap.mmap(-1, _BLOCK) as block:  # on a page, as O_DIRECT wants it
        block.write(os.urandom(_BLOCK))  # a disk may compress zeros
        descriptor = os.open(name, os.O_RDWR | flag)
        try:
            began = time.perf_counter()
            count = _repeat(lambda index: os.pwrite(descriptor, block, index * _BLOCK), _BLOCKS)
            os.fsync(descriptor)
            written = count * _BLOCK / (time.perf_counter() - began)
            if not flag and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            count = _repeat(lambda index: os.preadv(descriptor, [block], index * _BLOCK), count)
            return written, count * _BLOCK / (time.perf_counter() - began)
        finally:
            os.close(descriptor)


def _repeat(transfer: Callable[[int], int], most: int) -> int:
    """Transfer blocks until the time is over; return how many."""
    began = time.perf_counter()
    for index in range(most):
        nbytes = transfer(index)
        if nbytes != _BLOCK:
            raise OSError(f"the disk took {nbytes} of {_BLOCK} bytes")
        if time.perf_counter() - began > _SECONDS:
            return index + 1
    return most


def measure_adamw(local_ranks: int) -> list[Finding]:
    """Step AdamW on the host, as `offload.optimizer: cpu` does; all ranks of a host at once."""
    parameter = torch.nn.Parameter(torch.zeros(_NUMEL, device="cpu"))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    optimizer.step()  # makes the state
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.5:
        optimizer.step()
        steps += 1
    rate = steps * _NUMEL / (time.perf_counter() - began)
    threads, cores = idle_cores(local_ranks)
    values = {"elements_per_s": rate, "threads": threads, "cores_per_rank": cores}
    has = f"{counted(threads, 'thread')} and about {counted(cores, 'core')}"
    text = f"{rate / 1e6:,.0f} million elements/s a rank; it has {has}"
    if 2 * threads <= cores:
        fix = f"OMP_NUM_THREADS={cores} (launchers set 1), if the optimizer is to be offloaded"
        return [Finding("AdamW on the host", text, Verdict.NOTE, fix, values)]
    return [Finding("AdamW on the host", text, values=values)]


def measure_starts(device: torch.device) -> list[Finding]:
    """Measure how fast the host starts kernels, which decides where these are small; all ranks of a host at once."""
    if device.type != "cuda":
        return []
    seconds = start_seconds(device)
    text = f"the host starts a kernel in {seconds * 1e6:.0f} us (ourshard plan --kernel-start {seconds * 1e6:.0f})"
    return [Finding("kernel starts", text, values={"seconds": seconds})]
