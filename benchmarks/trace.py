"""Say where the time of a step went, from the kernels of one rank.

    torchrun --nproc_per_node 2 benchmarks/trace.py --engine ourshard3 --work llama-1b

Kernels and copies are put into groups. Each moment of the step belongs to the first group of this order that is at
work: products and attention, other compute, optimizer, copies, communication; or to none, which is the host's gap. What
communication has for itself is exposed. `busy` is the time of a group counted alone, also beside others.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES, Phases
from rich.console import Console
from rich.table import Table
from run_one import bypass_mask_builder
from works import WORKS

Span = tuple[float, float]  # start and end, milliseconds

# The first group whose word is in a kernel's name has it.
GROUPS = {
    "gather and reduce (NCCL)": ("nccl",),
    "barriers of peers": ("barrier",),
    "copies between GPUs": ("memcpy ptop", "memcpy peer"),
    "mean of gradients": ("mean_into", "_mean"),
    "products and attention": ("gemm", "cutlass", "flash", "nvjet", "sm90_", "sm80_", "fmha", "cublas"),
    "optimizer and norm": ("adam", "multi_tensor", "lpnorm", "foreach"),
    "copies and casts": ("memcpy", "copy", "memset", "fillfunctor"),
}
OTHER = "other compute"
ORDER = (
    "products and attention",
    OTHER,
    "optimizer and norm",
    "copies and casts",
    "mean of gradients",
    "copies between GPUs",
    "gather and reduce (NCCL)",
    "barriers of peers",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES))
    parser.add_argument("--work", required=True, choices=sorted(WORKS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    figures, top = trace(options, device)
    if dist.get_rank() == 0:
        show(options, figures, top)
        if options.out:
            options.out.write_text(json.dumps({"engine": options.engine, "work": options.work, **figures}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def trace(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[tuple[str, float]]]:
    """Return milliseconds a step, by group: alone on the card and in all; and the longest kernels by name."""
    from torch.profiler import ProfilerActivity, profile

    bypass_mask_builder()
    work = WORKS[options.work]
    torch.manual_seed(0)
    with device:
        model = work.build()
    step = ENGINES[options.engine](model, work, Phases([]))
    ids = torch.randint(work.vocab, (work.batch, work.seq), device=device)
    for _ in range(4):
        step(ids)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(options.steps):
            step(ids)
        torch.cuda.synchronize()
    spans: dict[str, list[Span]] = defaultdict(list)
    names: dict[str, float] = defaultdict(float)
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type().name != "CUDA" or event.duration_ns() == 0:
            continue
        start = event.start_ns() / 1e6
        spans[group_of(event.name())].append((start, start + event.duration_ns() / 1e6))
        names[event.name()] += event.duration_ns() / 1e6 / options.steps
    top = sorted(names.items(), key=lambda item: -item[1])[:22]
    return shares(spans, options.steps), top


def group_of(name: str) -> str:
    lowered = name.lower()
    for group, words in GROUPS.items():
        if any(word in lowered for word in words):
            return group
    return OTHER


def shares(spans: dict[str, list[Span]], steps: int) -> dict[str, Any]:
    """Give each moment to the first group of `ORDER` at work; what is left between first and last kernel is a gap."""
    taken: list[Span] = []
    alone: dict[str, float] = {}
    for group in ORDER:
        before = length(taken)
        taken = union([*taken, *spans.get(group, [])])
        alone[group] = (length(taken) - before) / steps
    total = (taken[-1][1] - taken[0][0]) / steps
    alone["gaps of the host"] = total - length(taken) / steps
    busy = {group: sum(end - start for start, end in spans.get(group, [])) / steps for group in ORDER}
    return {"step_ms": total, "share_ms": alone, "busy_ms": busy}


def union(spans: Iterable[Span]) -> list[Span]:
    """Return sorted spans that do not overlap and cover the same time."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def show(options: argparse.Namespace, figures: dict[str, Any], top: list[tuple[str, float]]) -> None:
    console = Console(width=150)
    table = Table(title=f"{options.engine} on {options.work}: {figures['step_ms']:.1f} ms a step")
    table.add_column("group")
    table.add_column("of the step, ms", justify="right")
    table.add_column("busy, ms", justify="right")
    for group, value in figures["share_ms"].items():
        table.add_row(group, f"{value:.2f}", f"{figures['busy_ms'].get(group, 0.0):.2f}")
    console.print(table)
    for name, value in top:
        console.print(f"{value:8.2f} ms  {name[:130]}", highlight=False)


if __name__ == "__main__":
    main()
