"""Measure the host time that the engine adds, in Python microseconds per unit and step.

    python benchmarks/host.py --layers 48

One process plays rank 0 of two: collectives return at once (torch's fake process group), so what is left is the
engine's own work and the copies of a tiny model on the CPU. The same step without the engine is subtracted.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

import torch
import torch.distributed as dist
from engines import adamw, loss_of, rank_of_absent_world
from ourshard.config import ShardConfig
from ourshard.runtime.api import clip_grad_norm_, engine_of, shard_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from works import Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--merge", type=int, default=0, help="bytes up to which neighbouring layers are one unit")
    parser.add_argument("--profile", action="store_true", help="print where the Python time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    work = Work("host", options.layers, hidden=32, heads=2, kv_heads=1, ffn=64, batch=1, seq=8, vocab=64)
    plain = step_time(work, None, options)
    sharded = step_time(work, options.stage, options)
    units = options.layers if not options.merge else "merged"
    print(f"plain {plain * 1e3:.1f} ms, stage {options.stage} {sharded * 1e3:.1f} ms a step; {units} units")
    print(f"added: {(sharded - plain) / options.layers * 1e6:.0f} us per layer and step")
    dist.destroy_process_group()


def step_time(work: Work, stage: int | None, options: argparse.Namespace) -> float:
    """Return the median seconds of a step, without the engine where `stage` is None."""
    torch.manual_seed(0)
    model = work.build()
    if stage is not None:
        config = ShardConfig.from_dict({"stage": stage, "persist_below": 0, "wrap": {"merge": options.merge}})
        shard_model(model, config, mesh=rank_of_absent_world())
        engine = engine_of(model)
        assert engine is not None
    optimizer = adamw(model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.long)

    def step() -> None:
        loss_of(model, ids).backward()
        if stage is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

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
