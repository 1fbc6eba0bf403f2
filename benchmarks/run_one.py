"""Measure one engine on one work. Started by `peers.py`, one process a GPU; prints one JSON line on rank 0.

torchrun --nproc_per_node 2 benchmarks/run_one.py --engine ourshard3 --work llama-1b
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES, Phases, Step
from ourshard.planning.starts import start_seconds
from torch.testing._internal.distributed.fake_pg import FakeStore
from works import Work, work_named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES))
    parser.add_argument("--work", required=True, help="of works.py")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--absent", type=int, default=0, help="ranks that do not exist: collectives return at once")
    parser.add_argument("--backend", default="", help="of the default group; Accelerate's may be cuda:nccl,cpu:gloo")
    parser.add_argument("--give-up", type=int, default=0, help="seconds after which to print all stacks and exit")
    parser.add_argument("--profile", default="", help="write a table of kernel time by group to this file")
    options = parser.parse_args()
    if options.give_up:
        faulthandler.dump_traceback_later(options.give_up, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if options.absent:
        dist.init_process_group("fake", rank=0, world_size=1 + options.absent, store=FakeStore())
    else:
        # FSDP2 takes norms on the host.
        backend = options.backend or ("cuda:nccl,cpu:gloo" if options.engine == "fsdp2_offload" else "nccl")
        # With a device the groups of a mesh are split off the first one; Megatron's are made as in its own examples.
        bound = None if options.engine.startswith(("megatron", "deepspeed")) else device
        dist.init_process_group(backend, device_id=bound)
    result = measure(options, device)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    if "ourshard.runtime.graphs" in sys.modules:
        sys.modules["ourshard.runtime.graphs"].let_go_of_graphs()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the figures of one engine on one work."""
    bypass_mask_builder()
    starts = of_each_rank(1e6 * start_seconds(device), device)
    work = work_named(options.work)
    step, phases = make_step(options.engine, work, device)
    batches = make_batches(work, device, 4)
    loss = torch.zeros(())
    for index in range(options.warmup):
        loss = step(batches[index % 4])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    phases.marks.clear()
    for index in range(options.steps):
        phases.mark()
        loss = step(batches[(options.warmup + index) % 4])
    phases.mark()
    torch.cuda.synchronize()
    figures = timings(phases.marks)
    by_rank = of_each_rank(figures["step_ms"], device)
    figures["step_ms"] = max(by_rank)  # a job goes at the pace of its slowest card, also where nothing is exchanged
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    result = {
        "engine": options.engine,
        "work": options.work,
        **figures,
        "rank_ms": by_rank,
        "start_us": max(starts),  # of a kernel, which the plan is told
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "device_gib": _device_used() / 2**30,
        "between_steps_gib": torch.cuda.memory_allocated() / 2**30,
        "host_ms": host_time(step, batches, min(5, options.steps)),
        "transport": transport(),
        "loss": total.item() / dist.get_world_size(),
        "tflops": work.flops / figures["step_ms"] / 1e9,
        "world": dist.get_world_size(),
        "absent": options.absent,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if options.profile:
        profile(step, batches, options.profile)
    return result


def make_step(engine: str, work: Work, device: torch.device) -> tuple[Step, Phases]:
    """Return a step of an engine on a model of its own, the same on all ranks, and where it marks its phases."""
    torch.manual_seed(0)
    with device:
        model = work.build()
    phases = Phases([])
    return ENGINES[engine](model, work, phases), phases


def make_batches(work: Work, device: torch.device, count: int) -> list[torch.Tensor]:
    """Return random batches of this rank."""
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    shape = (work.batch, work.seq)
    return [torch.randint(work.vocab, shape, device=device, generator=generator) for _ in range(count)]


def transport() -> str:
    """Return what moves ourshard's bytes, or nothing for other engines."""
    if "ourshard.runtime.engine" not in sys.modules:
        return ""
    from ourshard.runtime.engine import ENGINES as SHARDED

    return next((f"NCCL: {e.without_peers}" if e.peer is None else "peer copies" for e in SHARDED), "")


def of_each_rank(mine: float, device: torch.device) -> list[float]:
    """Return a time of every rank; cards of one host differ by a few percent."""
    times = torch.zeros(dist.get_world_size(), device=device)
    times[dist.get_rank()] = mine
    dist.all_reduce(times)
    return [time for time in times.tolist() if time]  # absent ranks have none


def _device_used() -> int:
    """Return all bytes taken on the card, also those outside of torch's allocator (contexts, NCCL, shared buffers)."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def bypass_mask_builder() -> None:
    """Without this, transformers reads a GPU tensor on the host in every forward, in all engines alike."""
    from transformers.models.llama import modeling_llama

    modeling_llama.create_causal_mask = lambda *args, **kwargs: None


def timings(marks: list[Any]) -> dict[str, float]:
    """Return median milliseconds of a step and of its phases; marks are (start, after forward, after backward) each."""
    starts = marks[::3]
    steps = [a.elapsed_time(b) for a, b in pairwise(starts)]
    forward = [a.elapsed_time(b) for a, b in zip(marks[::3], marks[1::3], strict=False)]
    backward = [a.elapsed_time(b) for a, b in zip(marks[1::3], marks[2::3], strict=False)]
    optimizer = [a.elapsed_time(b) for a, b in zip(marks[2::3], marks[3::3], strict=False)]
    named = {"step_ms": steps, "forward_ms": forward, "backward_ms": backward, "optimizer_ms": optimizer}
    return {name: statistics.median(values) for name, values in named.items()}


def host_time(step: Step, batches: list[torch.Tensor], repeats: int) -> float:
    """Return median milliseconds to issue a step from an idle GPU."""
    times = []
    for index in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(batches[index % 4])
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def profile(step: Step, batches: list[torch.Tensor], path: str) -> None:
    """Write what the GPU and the host spent two steps on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for index in range(2):
            step(batches[index])
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        averages = recorded.key_averages()
        with open(path, "w") as file:
            file.write(averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))
            file.write(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
