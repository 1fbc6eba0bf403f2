"""What ranks find out together: rates of collectives, and clocks. All functions are collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ourshard.doctor.finding import Finding, Verdict
from ourshard.runtime.collectives import reduce_scatter_flat
from ourshard.runtime.control import all_gather_flat
from ourshard.runtime.wording import counted

_NBYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
_SECONDS = 1.0  # about what one rate takes
_SLOW = {"cuda": 2e9, "cpu": 0.05e9}  # bytes/s; a GPU below 16 Gb/s most likely speaks over plain sockets
_SKEW = 1.0  # seconds


def measure_collectives(device: torch.device) -> list[Finding]:
    """Return the rates of all-gather and reduce-scatter over all ranks, by bytes that a rank puts on the wire."""
    world = dist.get_world_size()
    numel = _NBYTES[device.type] // 4 // world
    part, whole = torch.ones(numel, device=device), torch.ones(numel * world, device=device)
    works: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: all_gather_flat(whole, part),
        "reduce-scatter": lambda: reduce_scatter_flat(part, whole),
    }
    wire = whole.nbytes * (world - 1) / world
    rates = {name: wire / _seconds(work, device) for name, work in works.items()}
    text = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    text = f"{text} a rank over {counted(world, 'rank')} ({dist.get_backend()}, {whole.nbytes // 2**20} MiB)"
    values = {f"{name}_bytes_per_s": rate for name, rate in rates.items()}
    if min(rates.values()) < _SLOW[device.type]:
        fix = (
            "NCCL_DEBUG=INFO shows the path; set NCCL_SOCKET_IFNAME (or GLOO_SOCKET_IFNAME) to the fast network, "
            "and see that /dev/shm is large and that peer access is on."
        )
        return [Finding("collectives", text, Verdict.NOTE, fix, values)]
    return [Finding("collectives", text, values=values)]


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call on the slowest rank; the same number on every rank."""
    work()
    first = _slowest(_timed(work, 1, device), device)
    count = max(2, min(20, int(_SECONDS / first)))
    return _slowest(_timed(work, count, device), device) / count


def _timed(work: Callable[[], Any], count: int, device: torch.device) -> float:
    _wait(device)
    meet(device)
    began = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return time.perf_counter() - began


def meet(device: torch.device) -> None:
    """Wait for all ranks, over the card of this one; unnamed, torch warns that it has to guess it."""
    dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def measure_clocks(messages: dist.ProcessGroup) -> list[Finding]:
    """Compare every rank's clock with rank 0's, by messages of a gloo group over all ranks.

    The offset is taken at the middle of the quickest of some round trips, as NTP does (RFC 5905, section 8).
    """
    offsets = [0.0]
    for rank in range(1, dist.get_world_size()):
        if dist.get_rank() == 0:
            offsets.append(_ask(rank, messages))
        elif dist.get_rank() == rank:
            _answer(messages)
    if dist.get_rank() != 0:
        return []
    skew = max(offsets) - min(offsets)
    values = {"skew_s": skew, "offsets_s": offsets}
    text = f"the clocks of the ranks are within {skew * 1e3:.2f} ms"
    if skew > _SKEW:
        furthest = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
        fix = f"Start chrony (NTP) on the node of rank {furthest}; times in logs and of files do not compare."
        return [Finding("clocks", text, Verdict.NOTE, fix, values)]
    return [Finding("clocks", text, values=values)]


_TRIPS = 8


def _ask(rank: int, messages: dist.ProcessGroup) -> float:
    """Return how far `rank`'s clock is ahead of this one's, in seconds."""
    trips = []
    for _ in range(_TRIPS):
        answer = torch.zeros(1, dtype=torch.float64, device="cpu")
        began = time.time()
        dist.send(torch.zeros(1, dtype=torch.float64, device="cpu"), rank, group=messages)
        dist.recv(answer, rank, group=messages)
        ended = time.time()
        trips.append((ended - began, float(answer) - (began + ended) / 2))
    return min(trips)[1]


def _answer(messages: dist.ProcessGroup) -> None:
    for _ in range(_TRIPS):
        dist.recv(torch.zeros(1, dtype=torch.float64, device="cpu"), 0, group=messages)
        dist.send(torch.tensor([time.time()], dtype=torch.float64, device="cpu"), 0, group=messages)
