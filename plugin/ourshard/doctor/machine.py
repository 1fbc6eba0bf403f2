"""GPUs, host memory and the limits that a machine or a container sets."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ourshard.doctor.finding import Finding, Verdict
from ourshard.runtime.host_room import free_memory, memory_limit
from ourshard.runtime.wording import counted, memory_text

_GIB, _MIB = 2**30, 2**20
_PINNED = 64 * _MIB  # pinned by way of trial
_FEW_FILES, _FILES = 1024, 65536


def look_at_gpus(device: torch.device) -> list[Finding]:
    """Return this rank's card, and which cards of the process's list it can't reach directly."""
    if device.type != "cuda":
        return [Finding("GPUs", "none is used; ranks compute on the CPU", values={"gpus": 0})]
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    values = {"name": properties.name, "free_bytes": free, "total_bytes": total}
    text = f"{device} {properties.name}, {memory_text(free)} of {memory_text(total)} free"
    findings = [Finding("GPUs", text, values=values)]
    if free < 0.9 * total:
        fix = "See with nvidia-smi who holds it, and end what is left over."
        findings = [Finding("GPUs", f"{text}: others hold a part", Verdict.NOTE, fix, values)]
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    deaf = [index for index in others if not torch.cuda.can_device_access_peer(device.index, index)]
    if others and not deaf:
        findings.append(Finding("links", f"{device} reaches all {len(others)} other GPUs directly"))
    elif deaf:
        text = f"{device} can't reach GPUs {', '.join(map(str, deaf))} directly: copies pass through host memory"
        fix = "See `nvidia-smi topo -m`; virtual machines need the switch (ACS, IOMMU) set for peer access."
        findings.append(Finding("links", text, Verdict.NOTE, fix))
    return findings


def look_at_memory(device: torch.device, local_ranks: int) -> list[Finding]:
    """Return what the host (or the container) has free, and whether memory can be pinned."""
    free, limit = free_memory(), memory_limit()
    values = {"free_bytes": free, "limit_bytes": limit[0] if limit else None}
    bound = f", container limit {memory_text(limit[0])}" if limit else ", no container limit"
    text = f"{memory_text(free)} free for {counted(local_ranks, 'rank')} of this host{bound}"
    if free < local_ranks * _GIB:
        fix = "Raise the container's memory, start fewer ranks, or end what holds it; the kernel kills without a word."
        return [Finding("host memory", text, Verdict.PROBLEM, fix, values), *_pinning(device)]
    return [Finding("host memory", text, values=values), *_pinning(device)]


def _pinning(device: torch.device) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else memory_text(soft)
    values = {"memlock_bytes": None if soft == resource.RLIM_INFINITY else soft}
    if device.type != "cuda":
        yield Finding("pinned memory", f"ulimit -l is {limit}; without a GPU nothing is pinned", values=values)
        return
    try:
        torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        text = f"{_PINNED // _MIB} MiB can't be pinned (ulimit -l is {limit}): {str(error).splitlines()[0]}"
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1), or offload.pin_memory: false"
        yield Finding("pinned memory", text, Verdict.PROBLEM, fix, values)
    else:
        yield Finding("pinned memory", f"{_PINNED // _MIB} MiB were pinned; ulimit -l is {limit}", values=values)


def look_at_limits(folder: Path, local_ranks: int) -> list[Finding]:
    """Return shared memory, open files, and free space where checkpoints would go."""
    return [*_shared_memory(local_ranks), *_open_files(), _free_space(folder)]


def _shared_memory(local_ranks: int) -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        return
    usage = shutil.disk_usage(place)
    text = f"{memory_text(usage.free)} of {memory_text(usage.total)} free in /dev/shm"
    values = {"free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < local_ranks * 64 * _MIB:  # 64 MiB is what docker gives a container
        fix = (
            "docker run --shm-size=16g (or --ipc=host), outside of containers mount -o remount,size=16G /dev/shm; NCCL "
            "and the workers of data loaders put buffers there."
        )
        yield Finding("shared memory", text, Verdict.PROBLEM, fix, values)
    else:
        yield Finding("shared memory", text, values=values)


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        yield Finding("open files", f"ulimit -n is {soft}", Verdict.NOTE, _more_files(hard), values)
    else:
        yield Finding("open files", f"ulimit -n is {soft}", values=values)


def _more_files(hard: int) -> str:
    why = "ranks, data loaders and checkpoints open many files."
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if most < _FEW_FILES:
        return f"Raise the hard limit, {hard} (docker run --ulimit nofile={_FILES}, or limits.conf as root): {why}"
    return f"ulimit -n {most}; {why}"


def _free_space(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    text = f"{memory_text(usage.free)} of {memory_text(usage.total)} free in {folder}"
    values = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < _GIB:
        fix = "Make room, or name another folder with --folder; `ourshard plan` says how large a checkpoint is."
        return Finding("free space", text, Verdict.PROBLEM, fix, values)
    return Finding("free space", text, values=values)


def idle_cores(local_ranks: int) -> tuple[int, int]:
    """Return torch's threads, and the cores that a rank of this host could use."""
    return torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // local_ranks)
