"""Measure the host time that the engine adds, in Python microseconds per unit and step.

    python benchmarks/host.py --layers 48
    python benchmarks/host.py --count

One process plays rank 0 of two: collectives return at once (torch's fake process group), so what is left is the
engine's own work and the copies of a tiny model on the CPU. The same step without the engine is subtracted.
With `--count` calls of Python and C, and operators of torch, are counted for a layer: these repeat.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from engines import LR, loss_of, rank_of_absent_world
from ourshard.config import ShardConfig
from ourshard.runtime.api import clip_grad_norm_, shard_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from works import Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--persist-below", type=int, default=0, help="elements; smaller parameters stay whole")
    parser.add_argument("--merge", type=int, default=0, help="bytes up to which neighbouring layers are one unit")
    parser.add_argument("--count", action="store_true", help="count calls and operators instead of microseconds")
    parser.add_argument("--profile", action="store_true", help="print where the Python time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    work = Work("host", options.layers, hidden=32, heads=2, kv_heads=1, ffn=64, batch=1, seq=8, vocab=64)
    if options.count:
        count(work, options)
        return
    plain = step_time(work, None, options)
    sharded = step_time(work, options.stage, options)
    units = options.layers if not options.merge else "merged"
    print(f"plain {plain * 1e3:.1f} ms, stage {options.stage} {sharded * 1e3:.1f} ms a step; {units} units")
    print(f"added: {(sharded - plain) / options.layers * 1e6:.0f} us per layer and step")
    dist.destroy_process_group()


def count(work: Work, options: argparse.Namespace) -> None:
    """Print what a layer adds to a step, by two models of which one has four layers more."""
    for stage in (None, options.stage):
        # All models are there while any is counted: a step looks at each that is sharded.
        steps = [make_step(replace(work, layers=layers), stage, options) for layers in (8, 12)]
        for step in steps * 3:
            step()
        calls, operators = ([counted(step) for step in steps] for counted in (calls_of, operators_of))
        name = "plain" if stage is None else f"stage {stage}"
        print(
            f"{name}: {(calls[1] - calls[0]) / 4} calls, {(operators[1] - operators[0]) / 4} operators a layer and step"
        )
    dist.destroy_process_group()


def calls_of(step: Callable[[], None]) -> int:
    """Return the calls of Python and C functions in a step."""
    found = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return found


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += 1
        return operator(*args, **(kwargs or {}))


def operators_of(step: Callable[[], None]) -> int:
    """Return the operators of torch in a step, collectives included."""
    with _Operators() as operators:
        step()
    return operators.found


def make_step(work: Work, stage: int | None, options: argparse.Namespace) -> Callable[[], None]:
    """Return a step of a new model, without the engine where `stage` is None; in bf16 where calls are counted."""
    torch.manual_seed(0)
    model = work.build()
    precision = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if options.count else {}
    if stage is not None:
        wrap = {"merge": options.merge}
        config = {"stage": stage, "persist_below": options.persist_below, "wrap": wrap, "precision": precision}
        shard_model(model, ShardConfig.from_dict(config), mesh=rank_of_absent_world())
    elif options.count:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=options.count or None)
    ids = torch.zeros(1, 8, dtype=torch.long)

    def step() -> None:
        loss_of(model, ids).backward()
        if stage is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_time(work: Work, stage: int | None, options: argparse.Namespace) -> float:
    """Return the median seconds of a step, without the engine where `stage` is None."""
    step = make_step(work, stage, options)
    times = []
    for _ in range(5):
        step()
    profiler = cProfile.Profile()
    if options.profile and stage is not None:
        profiler.enable()
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    if options.profile and stage is not None:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return statistics.median(times)


if __name__ == "__main__":
    main()
