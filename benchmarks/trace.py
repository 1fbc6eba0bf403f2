"""Say where the time of a step went, from the kernels of each rank.

    torchrun --nproc_per_node 2 benchmarks/trace.py --engine ourshard3 --work llama-1b

Kernels and copies are put into groups, and each moment of the step is given to one: Note [Shares] in
`ourshard/runtime/timeline.py`. A card that is faster waits for the slowest: where a rank waits least, in barriers and
NCCL, its other groups say what the step takes; its longest kernels are listed. In a Trainer, `ShardProfilerCallback`
does this.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES
from ourshard.runtime import timeline
from rich.console import Console
from rich.table import Table
from run_one import bypass_mask_builder, make_step
from works import WORKS

Trace = tuple[dict[str, Any], list[tuple[str, float]]]
WAITS = (timeline.GATHER, timeline.REDUCE, "barriers of peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES))
    parser.add_argument("--work", required=True, choices=sorted(WORKS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the figures to this file, one JSON line a rank")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    traced: list[Trace] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(traced, trace(options, device))
    if dist.get_rank() == 0:
        show(options, traced)
        if options.out:
            with options.out.open("a") as file:
                for rank, (figures, top) in enumerate(traced):
                    head = {"engine": options.engine, "work": options.work, "rank": rank}
                    file.write(json.dumps({**head, **figures, "longest_ms": dict(top)}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def trace(options: argparse.Namespace, device: torch.device) -> Trace:
    """Return milliseconds a step of this rank, by group: alone on the card and in all; and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    bypass_mask_builder()
    work = WORKS[options.work]
    step, _ = make_step(options.engine, work, device)
    ids = torch.randint(work.vocab, (work.batch, work.seq), device=device)
    for _ in range(4):
        step(ids)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(options.steps):
            step(ids)
        torch.cuda.synchronize()
    spans: dict[str, list[timeline.Span]] = defaultdict(list)
    names: dict[str, float] = defaultdict(float)
    busy: list[tuple[float, float, str]] = []
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type().name != "CUDA" or event.duration_ns() == 0:
            continue
        name, start, took = event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6
        spans[timeline.gpu_group_of(name)].append((start, start + took))
        names[name] += took / options.steps
        busy.append((start, start + took, name))
    found = dataclasses.asdict(timeline.shares(spans, timeline.GPU_ORDER, options.steps))
    found["gaps_ms"] = {place: gap / options.steps for place, gap in longest(gaps_of(busy), 10)}
    return found, longest(names, 22)


def gaps_of(busy: list[tuple[float, float, str]]) -> dict[str, float]:
    """Return the time in which nothing ran, by the kernels before and after it."""
    gaps: dict[str, float] = defaultdict(float)
    ended, last = float("inf"), ""
    for start, end, name in sorted(busy):
        if start > ended:
            gaps[f"{last[:60]} -> {name[:60]}"] += start - ended
        if not last or end > ended:
            ended, last = end, name
    return gaps


def longest(times: dict[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:count]


def show(options: argparse.Namespace, traced: list[Trace]) -> None:
    console = Console(width=150)
    steps = ", ".join(f"{figures['step_ms']:.1f}" for figures, _ in traced)
    table = Table(title=f"{options.engine} on {options.work}: {steps} ms a step")
    table.add_column("group")
    for rank in range(len(traced)):
        table.add_column(f"rank {rank}: of the step, ms", justify="right")
        table.add_column("busy, ms", justify="right")
    for group in traced[0][0]["share_ms"]:
        cells = []
        for figures, _ in traced:
            cells += [f"{figures['share_ms'][group]:.2f}", f"{figures['busy_ms'].get(group, 0.0):.2f}"]
        table.add_row(group, *cells)
    console.print(table)
    rank = min(range(len(traced)), key=lambda rank: sum(traced[rank][0]["share_ms"][group] for group in WAITS))
    console.print(f"rank {rank} waits least; its longest kernels:")
    for name, value in traced[rank][1]:
        console.print(f"{value:8.2f} ms  {name[:130]}", highlight=False)
    console.print("its longest gaps, each between two kernels:")
    for name, value in traced[rank][0]["gaps_ms"].items():
        console.print(f"{value:8.2f} ms  {name}", highlight=False)


if __name__ == "__main__":
    main()
