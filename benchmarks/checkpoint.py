"""Measure how long a save stops training, how long it takes in all, its bytes, and the host memory it needs.

torchrun --nproc_per_node 2 benchmarks/checkpoint.py --engine ours-async [--hidden 2048 --layers 20] [--folder DIR]

Engines: ours, ours-async, dcp, dcp-async (FSDP2 with torch's distributed checkpoint). A stack of linear layers with
Adam, of hidden^2 * layers parameters, fully sharded in fp32. It saves twice, since buffers are made at the first; one
JSON line comes of rank 0, with the slower rank's times. `stopped_s`: inside the save's call, with the device idle
before; `step_during_s`: the mean step while a background save was written, beside `step_s` with none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from loading import peak
from torch import nn

ENGINES = ("ours", "ours-async", "dcp", "dcp-async")
Finish = Callable[[], Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", default="/tmp/ourshard_checkpoint_benchmark")
    return parser.parse_args()


def shard(engine: str, model: nn.Sequential) -> nn.Module:
    """Shard the model fully, a unit for each layer."""
    if engine.startswith("ours"):
        import ourshard

        checkpoint = {"asynchronous": engine == "ours-async"}
        return ourshard.shard_model(model, {"stage": 3, "wrap": {"classes": ["Linear"]}, "checkpoint": checkpoint})
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def save(
    engine: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, group: dist.ProcessGroup
) -> Finish:
    """Begin a save; return what waits for it to be complete. `group`: for DCP's thread, apart from training's."""
    if engine.startswith("ours"):
        import ourshard

        ourshard.save(model, optimizer, folder)
        return ourshard.wait_for_save
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if engine == "dcp":
        dcp.save(state, checkpoint_id=folder)
        return lambda: None
    future: Any = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    result: Finish = future.result
    return result


class Run:
    """One engine, trained and saved."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.group = dist.new_group(backend="gloo")
        torch.manual_seed(0)
        layers = [nn.Linear(args.hidden, args.hidden, bias=False, device=device) for _ in range(args.layers)]
        self.model = shard(args.engine, nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.rows = torch.randn(64, args.hidden, device=device)

    def step(self) -> float:
        """Train a step; return its seconds."""
        start = time.perf_counter()
        self.model(self.rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()
        return time.perf_counter() - start

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def save(self, folder: str) -> dict[str, float]:
        """Save once, with steps beside it."""
        quiet = [self.step() for _ in range(5)]
        dist.barrier()
        start = time.perf_counter()
        finish = save(self.args.engine, self.model, self.optimizer, folder, self.group)
        self.sync()
        stopped = time.perf_counter() - start
        beside = [self.step() for _ in range(5)] if self.args.engine.endswith("async") else []
        finish()
        total = time.perf_counter() - start
        during = sum(beside) / len(beside) if beside else 0.0
        return {"stopped_s": stopped, "total_s": total, "step_s": sum(quiet) / 5, "step_during_s": during}


def slowest(times: dict[str, float]) -> dict[str, float]:
    """Return the longest of each time over the ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, times)
    return {key: round(max(each[key] for each in told), 4) for key in times}


def main() -> None:
    args = parse()
    root = Path(args.folder)
    run = Run(args)
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
    for _ in range(3):
        run.step()
    dist.barrier()
    before = psutil.Process().memory_info().rss / 2**20
    first, second = (slowest(run.save(str(root / f"step-{number}"))) for number in (1, 2))
    memory = slowest({"host_peak_mib": peak() - before})
    if dist.get_rank() == 0:
        nbytes = sum(path.stat().st_size for path in (root / "step-2").rglob("*") if path.is_file())
        device = torch.cuda.get_device_name() if run.cuda else "cpu"
        row = {"engine": args.engine, "device": device, "ranks": dist.get_world_size()}
        row |= {"parameters": args.hidden**2 * args.layers, "nbytes": nbytes, **memory, "first": first, **second}
        print(json.dumps(row))
        shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
