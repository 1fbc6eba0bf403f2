"""Look at the host's memory before a model is sharded: what offload will take of it, and what is free."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import nn

from ourshard.runtime.wording import counted, memory_text

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine

logger = logging.getLogger("ourshard")

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes that one rank is to take of the host."""

    nbytes: int  # with any optimizer: masters, gradients, shards of parameters
    with_adamw: int  # also its state, and the windows through which it passes if it is on a disk


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank says of its machine."""

    machine: str
    need: HostNeed
    given_back: int
    free: int


def check_host(engine: Engine, model: nn.Module, need: HostNeed) -> None:
    """Raise `ValueError` on all ranks where the memory of a machine can't hold what its ranks need. Collective.

    The kernel would end a process without a word. What the model has on the host now is given back meanwhile.
    """
    control, machine = engine.control, socket.gethostname()
    mine = _Told(machine, need, _on_host(model), free_memory())
    told = control.gather_objects(mine, "comparing the host memory of offload")
    beside = [each for each in told if isinstance(each, _Told) and each.machine == machine]
    room = min(each.free for each in beside) + sum(each.given_back for each in beside)
    least, likely = sum(each.need.nbytes for each in beside), sum(each.need.with_adamw for each in beside)
    numbers = (
        f"{memory_text(least)} of the memory of {machine} are needed for masters, gradients and parameters of "
        f"{counted(len(beside), 'rank')}, with AdamW's state {memory_text(likely)}; {memory_text(room)} are free"
    )
    error = f"offload: {numbers}. Use more machines, offload.optimizer: nvme, or a smaller offload.optimizer_ratio."
    control.check(error if least > room else None, "checking the host memory of offload")
    if engine.mesh.world.rank == 0:
        if likely > room:
            logger.warning("offload: %s. The kernel ends a process that takes more.", numbers)
        logger.info("offload: %s, %s for each rank", numbers, memory_text(need.with_adamw))


def _on_host(model: nn.Module) -> int:
    storages = (p.untyped_storage() for p in model.parameters() if p.device == torch.device("cpu"))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_memory() -> int:
    """Return the bytes that this process and its children can still take of the machine, or of the container."""
    free, limit = psutil.virtual_memory().available, memory_limit()
    return free if limit is None else min(free, limit[0] - limit[1])


def memory_limit(root: Path = _CGROUP, path: str | None = None) -> tuple[int, int] | None:
    """Return (limit, used) in bytes of the tightest cgroup around this process; None without a limit.

    Files that the kernel keeps in memory are not used: it lets go of them first.
    `path` is the process's group below `root`; read from /proc where it is not given.
    """
    group = path if path is not None else _own_group()
    found = []
    for folder in [root / group, *(root / group).parents] if group else [root]:
        if folder == root.parent:
            break
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, current = _number(folder / most), _number(folder / used)
            if limit is not None and current is not None and limit < psutil.virtual_memory().total:
                found.append((limit, max(0, current - _cached(folder))))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _own_group() -> str:
    """Return this process's group of cgroup v2 below the root; "" where it is the root or there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _cached(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split() for line in lines)
    return sum(int(sizes.get(name, 0)) for name in ("active_file", "inactive_file"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None
