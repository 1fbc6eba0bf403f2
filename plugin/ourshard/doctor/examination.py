"""All probes in order, on this rank or on all of them together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ourshard.doctor.finding import Finding, Verdict, run, worst
from ourshard.doctor.machine import look_at_gpus, look_at_limits, look_at_memory
from ourshard.doctor.ranks import measure_clocks, measure_collectives, meet
from ourshard.doctor.speed import measure_adamw, measure_disk, measure_starts
from ourshard.doctor.training import check_training
from ourshard.doctor.versions import look_at_versions

TIMEOUT = timedelta(seconds=60)  # a collective that takes longer hangs


@dataclass(frozen=True, slots=True)
class Report:
    """What was found on all ranks."""

    findings: tuple[Finding, ...]
    world: int
    seconds: float

    @property
    def healthy(self) -> bool:
        return worst(self.findings) is not Verdict.PROBLEM

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "healthy": self.healthy,
            "verdict": worst(self.findings).value,
            "world": self.world,
            "seconds": round(self.seconds, 2),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def examine(folder: Path) -> Report | None:
    """Run every probe and return the report on rank 0, None on the others.

    Where a launcher's environment describes several ranks, joins their process group; collective then.
    """
    began = time.monotonic()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device()
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        mine = [replace(finding, ranks=(rank,)) for finding in _on_this_rank(device, folder)]
        gathered = _gathered(mine, world)
        together = _together(device, world)
        everyone = tuple(range(world))
        checked = _gathered([replace(finding, ranks=(rank,)) for finding in together], world)
        if rank != 0:
            return None
        found = [*_merged(gathered), *_alike(gathered, everyone), *_merged(checked)]
        return Report(tuple(found), world, time.monotonic() - began)
    finally:
        if world > 1:
            dist.destroy_process_group()


def uses_gpus() -> bool:
    """Say whether accelerate would choose GPUs here."""
    from ourshard.integrations import switch

    return torch.cuda.is_available() and not switch.flag("ACCELERATE_USE_CPU")


def _device() -> torch.device:
    """Return this rank's device, as accelerate would choose it."""
    if not uses_gpus():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _on_this_rank(device: torch.device, folder: Path) -> list[Finding]:
    """Look at what a rank sees alone. What a host has once is looked at by its first rank."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = run("versions", look_at_versions) + run("GPUs", lambda: look_at_gpus(device))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        found += run("host memory", lambda: look_at_memory(device, local_ranks))
        found += run("limits", lambda: look_at_limits(folder, local_ranks))
        found += run("disk", lambda: measure_disk(folder))
    return found


def _together(device: torch.device, world: int) -> list[Finding]:
    """Measure what ranks do at the same time; rank 0 alone returns what is the same for all."""
    if world > 1:
        meet(device)
    found = run("AdamW on the host", lambda: measure_adamw(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    found += run("kernel starts", lambda: measure_starts(device))
    if world == 1:
        text = "one process: no collective was measured; see --processes, or start it with a launcher"
        return [*found, Finding("collectives", text), *run("training", lambda: check_training(device))]
    messages = dist.new_group(backend="gloo", timeout=TIMEOUT)
    probes: dict[str, Callable[[], list[Finding]]] = {
        "collectives": lambda: measure_collectives(device),
        "clocks": lambda: measure_clocks(messages),
        "training": lambda: check_training(device),
    }
    for name, probe in probes.items():
        seen = run(name, probe)
        found += seen if dist.get_rank() == 0 or worst(seen) is Verdict.PROBLEM else []
    return found


def _gathered(findings: list[Finding], world: int) -> list[Finding]:
    """Return the findings of all ranks, in the order of ranks. Collective."""
    if world == 1:
        return findings
    parts: list[list[Finding]] = [[] for _ in range(world)]
    dist.all_gather_object(parts, findings)
    return [finding for part in parts for finding in part]


def _merged(findings: list[Finding]) -> list[Finding]:
    """Join findings that say the same of several ranks, in the order in which they first come."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.name, finding.text)
        before = found.get(key)
        found[key] = finding if before is None else replace(before, ranks=before.ranks + finding.ranks)
    names = list(dict.fromkeys(finding.name for finding in findings))
    return sorted(found.values(), key=lambda finding: names.index(finding.name))


def _alike(findings: list[Finding], everyone: tuple[int, ...]) -> list[Finding]:
    """Return what differs between ranks and must not: versions, and cards."""
    found = []
    versions = {str(finding.values) for finding in findings if finding.name == "versions" and finding.values}
    if len(versions) > 1:
        fix = "Install the same versions on every node; ranks would shard and save differently."
        found.append(
            Finding(
                "versions", "ranks have different versions", Verdict.PROBLEM, fix, {"seen": sorted(versions)}, everyone
            )
        )
    cards = {finding.values["name"] for finding in findings if finding.name == "GPUs" and "name" in finding.values}
    if len(cards) > 1:
        fix = "The slowest card and the smallest memory decide; use nodes of one kind."
        text = f"ranks have different cards: {', '.join(sorted(cards))}"
        found.append(Finding("GPUs", text, Verdict.NOTE, fix, {"seen": sorted(cards)}, everyone))
    return found
