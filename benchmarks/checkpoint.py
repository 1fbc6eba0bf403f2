"""Measure how long a save stops training, how long it takes in all, its bytes, and the host memory it needs.

python benchmarks/checkpoint.py [--engines ours-async dcp] [--gpus 2] [--hidden 4096 --layers 60] [--folder DIR]

Engines: ours, ours-async, dcp, dcp-async (FSDP2 with torch's distributed checkpoint), deepspeed (ZeRO-3, whose
`save_checkpoint` has no background). Those that are not installed are skipped by name. A stack of linear layers with
Adam, of hidden^2 * layers parameters, fully sharded in fp32, in processes of its own for each engine. It saves twice,
since buffers are made at the first. What is going on is told on lines with a #; a JSON line comes of rank 0 after each
save, with the slower rank's times, so that an engine that does not end in time has told its first. `stopped_s`: inside
the save's call, with the device idle before; `step_during_s`: the mean step while a background save was written,
beside `step_s` with none; `host_peak_mib`: the peak of a rank's resident memory above what it had before the first
save; `pinned_mib`: how much of ours the driver has pinned. The folder is on /tmp, or in memory (/dev/shm) where that
disk would take more than half of `--timeout` to write the files.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
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
SAVES = 2
BYTES = 12  # for a parameter in fp32 with Adam
Finish = Callable[[], Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--gpus", type=int, default=2, help="ranks; without a GPU as many processes on the CPU")
    parser.add_argument("--hidden", type=int, default=4096 if torch.cuda.is_available() else 256)
    parser.add_argument("--layers", type=int, default=60 if torch.cuda.is_available() else 8)
    parser.add_argument("--folder", help="where to write; by default chosen by what the disk does")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one engine")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"# {text}", flush=True)


def choose_folder(args: argparse.Namespace) -> str:
    """Return the folder that was asked for, or one on a disk that ends in time."""
    for root in [args.folder] if args.folder else ["/tmp", "/dev/shm"]:
        rate = write_rate(root)
        seconds = SAVES * BYTES * args.hidden**2 * args.layers / rate
        free = shutil.disk_usage(root).free
        say(f"{root}: {rate / 1e9:.2f} GB/s, flushed; {free / 1e9:.0f} GB free; {SAVES} saves take {seconds:.0f} s")
        if seconds < args.timeout / 2:
            break
    return os.path.join(root, "ourshard_checkpoint_benchmark")


def write_rate(root: str) -> float:
    """Write 512 MiB and flush them; return bytes a second."""
    os.makedirs(root, exist_ok=True)
    block = os.urandom(1 << 20) * 64
    with tempfile.TemporaryFile(dir=root) as file:
        start = time.perf_counter()
        for _ in range(8):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return 8 * len(block) / (time.perf_counter() - start)


def launch(engine: str, args: argparse.Namespace, folder: str) -> None:
    """Run one engine in processes of its own; print its lines as they come, and its last words where it fails."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        say(f"skipped {engine}: it is not installed")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}", __file__]
    command += ["--engines", engine, "--hidden", str(args.hidden), "--layers", str(args.layers)]
    command += ["--folder", folder, "--timeout", str(args.timeout)]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    guard = threading.Timer(args.timeout, lambda: os.killpg(process.pid, signal.SIGKILL))
    guard.start()
    last: collections.deque[str] = collections.deque(maxlen=150)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(('{"engine"', "# ")):
            print(line, end="", flush=True)
        else:
            last.append(line)
    code = process.wait()
    guard.cancel()
    if code:
        print(f"{engine} failed with {code} after {time.perf_counter() - start:.0f} s:\n{''.join(last)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)


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
    """Be one rank of one engine; rank 0 prints the lines."""
    faulthandler.dump_traceback_later(max(5, args.timeout - 10), exit=True)
    lead = os.environ["RANK"] == "0"
    root = Path(args.folder)
    start = time.perf_counter()
    run = Run(engine, args)
    for _ in range(3):
        run.step()
    if lead:
        say(f"{engine}: trains after {time.perf_counter() - start:.1f} s")
    before = reset_peak()
    for number in range(SAVES):
        if lead:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
        dist.barrier()
        told = slowest(run.save(str(root / f"step-{number}")) | {"host_peak_mib": peak() - before} | pinned(engine))
        if lead:
            nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
            device = torch.cuda.get_device_name() if run.cuda else "cpu"
            row = {"engine": engine, "save": number + 1, "device": device, "ranks": dist.get_world_size()}
            row |= {"parameters": args.hidden**2 * args.layers, "nbytes": nbytes, "root": str(root.parent), **told}
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def pinned(engine: str) -> dict[str, float]:
    """Return how much host memory our background saves have pinned."""
    if engine != "ours-async":
        return {}
    from ourshard.checkpoint.background import BACKGROUND

    return {"pinned_mib": BACKGROUND.staging.pinned_nbytes / 2**20}


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        measure(args.engines[0], args)
        return
    folder = choose_folder(args)
    for engine in args.engines:
        launch(engine, args, folder)


if __name__ == "__main__":
    main()
