"""Compare engines where the host is the limit: all in the same processes, in turns.

    torchrun --nproc_per_node 2 benchmarks/turns.py --work llama-1b-host --engines limit ourshard3 ourshard1 fsdp2 ddp

Processes of one machine start kernels at paces that differ by a fifth, which is more than what engines differ by. Here
every engine has a model of its own in each process, and they take turns: a few steps each, again and again, so that
all have the same pace. What counts is the ratio to `limit` within a turn; the table has the median over turns. Memory
and loss are what `peers.py` is for. Without GPUs it runs on gloo, for `--work tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES
from ourshard.planning.starts import start_seconds
from rich.console import Console
from rich.table import Table
from run_one import bypass_mask_builder, make_batches, make_step, of_each_rank
from works import Work, work_named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="of works.py")
    parser.add_argument("--engines", nargs="+", default=["limit", "ourshard3", "ourshard1"], choices=sorted(ENGINES))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="of each engine in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each engine before the first turn")
    parser.add_argument("--out", type=Path, help="append the figures to this file, as JSON lines")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    results = measure(options, device)
    if dist.get_rank() == 0:
        show(results, options)
        if options.out:
            with options.out.open("a") as file:
                file.writelines(json.dumps(result) + "\n" for result in results)
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return the figures of each engine: milliseconds of a step in each turn, those of the slowest rank."""
    bypass_mask_builder()
    work = work_named(options.work)
    starts = of_each_rank(1e6 * start_seconds(device), device)
    steps = {engine: alone(engine, work, device) for engine in options.engines}
    for step in steps.values():
        for _ in range(options.warmup):
            step()
    by_turn: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(options.turns):
        for engine, step in steps.items():
            by_turn[engine].append(max(of_each_rank(step_ms(step, options.steps, device), device)))
    return [
        {
            "engine": engine,
            "work": options.work,
            "turns_ms": times,
            "step_ms": statistics.median(times),
            "of_limit": [mine / least for mine, least in zip(times, by_turn["limit"], strict=True)]
            if "limit" in by_turn
            else [],
            "start_us": max(starts),
            "world": dist.get_world_size(),
            "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
        }
        for engine, times in by_turn.items()
    ]


def alone(engine: str, work: Work, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a step of an engine on a model and a batch of its own."""
    step, phases = make_step(engine, work, device)
    (ids,) = make_batches(work, device, 1)

    def run() -> torch.Tensor:
        phases.marks.clear()
        return step(ids)

    return run


def step_ms(step: Callable[[], torch.Tensor], count: int, device: torch.device) -> float:
    """Return milliseconds of a step, the mean of `count` in a row, from when all ranks begin."""
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3 / count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print what each engine took, and how many times the limit's time in the same turn."""
    first = results[0]
    title = f"{options.work}, {first['world']} ranks, {first['card']}, torch {first['torch']}, {options.turns} turns"
    table = Table(title=f"{title}; a kernel starts in {first['start_us']:.0f} us")
    for head in ("engine", "step ms, median", "least", "most", "times the limit, median", "least", "most"):
        table.add_column(head, justify="left" if head == "engine" else "right")
    for result in results:
        times, ratios = result["turns_ms"], result["of_limit"]
        cells = [f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}"]
        cells += (
            [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else [""] * 3
        )
        table.add_row(result["engine"], *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
