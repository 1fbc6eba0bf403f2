"""Measure how long a save stops training, how long it takes in all, its bytes, and the host memory it needs.

python benchmarks/checkpoint.py [--engines ours-async dcp] [--gpus 2] [--hidden 4096 --layers 60] [--folder DIR]

Engines: ours, ours-async, dcp, dcp-async (FSDP2 with torch's distributed checkpoint), deepspeed (ZeRO-3, whose
`save_checkpoint` has no background). Those that are not installed are skipped by name. A stack of linear layers with
Adam, of hidden^2 * layers parameters, fully sharded in fp32, in processes of its own for each engine. It saves twice,
since buffers are made at the first; one JSON line comes of rank 0, with the slower rank's times. `stopped_s`: inside
the save's call, with the device idle before; `step_during_s`: the mean step while a background save was written,
beside `step_s` with none; `host_peak_mib`: the peak of a rank's resident memory above what it had before the first
save.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loading import peak, reset_peak
from torch import nn

ENGINES = ("ours-async", "ours", "dcp-async", "dcp", "deepspeed")
LR = 1e-4
Finish = Callable[[], Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--gpus", type=int, default=2, help="ranks; without a GPU as many processes on the CPU")
    parser.add_argument("--hidden", type=int, default=4096 if torch.cuda.is_available() else 256)
    parser.add_argument("--layers", type=int, default=60 if torch.cuda.is_available() else 8)
    parser.add_argument("--folder", default="/tmp/ourshard_checkpoint_benchmark")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one engine")
    return parser.parse_args()


def launch(engine: str, args: argparse.Namespace) -> None:
    """Run one engine in processes of its own; print its line, or why there is none."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        print(f"skipped {engine}: it is not installed", flush=True)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}", __file__]
    command += ["--engines", engine, "--hidden", str(args.hidden), "--layers", str(args.layers)]
    command += ["--folder", args.folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        told, _ = process.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        process.wait()
        print(f"{engine}: no result within {args.timeout} s", flush=True)
        return
    lines = [line for line in told.splitlines() if line.startswith('{"engine"')]
    print("\n".join(lines) if lines else f"{engine} failed:\n{told[-3000:]}", flush=True)


def shard(engine: str, model: nn.Sequential) -> Any:
    """Shard the model fully, a unit for each layer."""
    if engine.startswith("ours"):
        import ourshard

        checkpoint = {"asynchronous": engine == "ours-async"}
        return ourshard.shard_model(model, {"stage": 3, "wrap": {"classes": ["Linear"]}, "checkpoint": checkpoint})
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def deepspeed_engine(model: nn.Module) -> Any:
    """Shard the model and its optimizer with ZeRO-3."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 64,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    fused = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def save(engine: str, model: Any, optimizer: Any, folder: str, group: dist.ProcessGroup) -> Finish:
    """Begin a save; return what waits for it to be complete. `group`: for DCP's thread, apart from training's."""
    if engine.startswith("ours"):
        import ourshard

        ourshard.save(model, optimizer, folder)
        return ourshard.wait_for_save
    if engine == "deepspeed":
        model.save_checkpoint(folder)
        return lambda: None
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

    def __init__(self, engine: str, args: argparse.Namespace) -> None:
        self.engine = engine
        self.cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.group = dist.new_group(backend="gloo")
        torch.manual_seed(0)
        layers = [nn.Linear(args.hidden, args.hidden, bias=False, device=device) for _ in range(args.layers)]
        if engine == "deepspeed":
            self.model = self.optimizer = deepspeed_engine(nn.Sequential(*layers))
        else:
            self.model = shard(engine, nn.Sequential(*layers))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=self.cuda)
        self.rows = torch.randn(64, args.hidden, device=device)

    def step(self) -> float:
        """Train a step; return its seconds."""
        start = time.perf_counter()
        loss = self.model(self.rows).square().mean()
        if self.engine == "deepspeed":
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
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
        finish = save(self.engine, self.model, self.optimizer, folder, self.group)
        self.sync()
        stopped = time.perf_counter() - start
        beside = [self.step() for _ in range(5)] if self.engine.endswith("async") else []
        finish()
        total = time.perf_counter() - start
        during = sum(beside) / len(beside) if beside else 0.0
        return {"stopped_s": stopped, "total_s": total, "step_s": sum(quiet) / 5, "step_during_s": during}


def slowest(times: dict[str, float]) -> dict[str, float]:
    """Return the longest of each time over the ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, times)
    return {key: round(max(each[key] for each in told), 4) for key in times}


def measure(engine: str, args: argparse.Namespace) -> None:
    """Be one rank of one engine; rank 0 prints the line."""
    root = Path(args.folder)
    run = Run(engine, args)
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
    for _ in range(3):
        run.step()
    dist.barrier()
    before = reset_peak()
    first, second = (slowest(run.save(str(root / f"step-{number}"))) for number in (1, 2))
    memory = slowest({"host_peak_mib": peak() - before})
    if dist.get_rank() == 0:
        nbytes = sum(path.stat().st_size for path in (root / "step-2").rglob("*") if path.is_file())
        device = torch.cuda.get_device_name() if run.cuda else "cpu"
        row = {"engine": engine, "device": device, "ranks": dist.get_world_size()}
        row |= {"parameters": args.hidden**2 * args.layers, "nbytes": nbytes, **memory, "first": first, **second}
        print(json.dumps(row), flush=True)
        shutil.rmtree(root)
    dist.destroy_process_group()


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        measure(args.engines[0], args)
        return
    for engine in args.engines:
        launch(engine, args)


if __name__ == "__main__":
    main()
