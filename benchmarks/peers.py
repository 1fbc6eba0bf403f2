"""Compare ourshard with its peers on one machine, in one run.

    python benchmarks/peers.py --works llama-1b llama-4b-checkpointed --engines limit fsdp2 ourshard3 ourshard1

Each (engine, work) is its own set of processes, one a GPU. Peers that are not installed are skipped by name. Results
go to `--out` as JSON lines and to the terminal as a table with ratios.

With `--gpus 1 --absent 1` one GPU plays rank 0 of two under torch's fake process group: nothing goes over a wire and
losses mean nothing; what counts is the time that the host takes to issue a step.

A slow link, for codecs: GPUs that reach each other through sockets alone. The first engine is uncompressed.

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python benchmarks/peers.py --steps 3 --warmup 2 --timeout 60 --engines \\
        ourshard3-nccl ourshard3-nccl-bf16 ourshard3-nccl-last ourshard3-int8-int8 ourshard3-int8-int4 deepspeed3
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
NEEDS = {"deepspeed": "deepspeed", "megatron": "megatron_fsdp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=["llama-1b"])
    parser.add_argument("--engines", nargs="+", default=["limit", "ddp", "fsdp2", "ourshard3", "ourshard1"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--absent", type=int, default=0, help="ranks that do not exist (with --gpus 1): host rows only")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are timed")
    parser.add_argument("--threads", type=int, default=4, help="of a rank; 16 for works with the optimizer on the host")
    parser.add_argument("--timeout", type=int, default=150, help="seconds for one engine on one work")
    parser.add_argument("--out", type=Path, default=Path("out/peers.jsonl"))
    parser.add_argument("--profile", action="store_true", help="also write kernel tables beside --out")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for work in options.works:
        results += run_all(options.engines, work, options)
    show(results)


def run_all(engines: list[str], work: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run engines on one work, one after the other; note the figures of each in `options.out` as they come."""
    results = []
    for engine in engines:
        result = run(engine, work, options)
        if result:
            results.append(result)
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return results


def run(engine: str, work: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run one engine on one work; return its figures, or None with a line that says why not."""
    for prefix, package in NEEDS.items():
        if engine.startswith(prefix) and importlib.util.find_spec(package) is None:
            print(f"skipped {engine}: {package} is not installed", flush=True)
            return None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.gpus}"]
    command += [str(HERE / "run_one.py"), "--engine", engine, "--work", work, "--steps", str(options.steps)]
    command += ["--warmup", str(options.warmup)]
    command += ["--give-up", str(max(5, options.timeout - 10))]
    if options.absent:
        command += ["--absent", str(options.absent)]
    if options.profile:
        command += ["--profile", str(options.out.with_name(f"{work}.{engine}.txt"))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    with HostPeak() as host:
        try:
            output, _ = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            end_all(process.pid)
            output, _ = process.communicate()
            print(f"{engine} on {work}: no result in {options.timeout} s\n{output[-2000:]}", flush=True)
            return None
    for line in output.splitlines():
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            result["host_gib"] = host.nbytes / 2**30
            print(
                f"{work} {engine}: {result['step_ms']:.1f} ms, {result['reserved_gib']:.1f} GiB on a card, "
                f"{result['host_gib']:.1f} GiB of the host",
                flush=True,
            )
            return result
    print(f"{engine} on {work} failed:\n{output[-3000:]}", flush=True)
    return None


class HostPeak:
    """The most host memory that was taken in a `with` block, on a machine where nothing else runs.

    From what the system has available, as it counts pinned memory too, whoever took it. The page cache does not count.
    """

    def __init__(self) -> None:
        self._before = self._least = psutil.virtual_memory().available
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def nbytes(self) -> int:
        return self._before - self._least

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._least = min(self._least, psutil.virtual_memory().available)

    def __enter__(self) -> HostPeak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


def end_all(pid: int) -> None:
    """Kill a launcher and its workers, which have sessions of their own and would disturb all that comes after."""
    launcher = psutil.Process(pid)
    for process in [*launcher.children(recursive=True), launcher]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def show(results: list[dict[str, Any]]) -> None:
    """Print one table a work, with ratios to the limit and to FSDP2."""
    console = Console(width=170)
    for work in dict.fromkeys(r["work"] for r in results):
        rows = [r for r in results if r["work"] == work]
        step = {r["engine"]: r["step_ms"] for r in rows}
        world = f"{rows[0]['world']} ranks ({rows[0]['absent']} absent)"
        table = Table(title=f"{work}, {world}, {rows[0]['card']}, torch {rows[0]['torch']}")
        heads = [
            "engine",
            "step ms",
            "fwd+bwd+opt",
            "of limit",
            "vs fsdp2",
            "TFLOP/s",
            "peak GiB",
            "reserved",
            "card",
            "at rest",
            "host ms",
            "host GiB",
            "loss",
        ]
        for head in heads:
            table.add_column(head, justify="left" if head == "engine" else "right")
        for r in rows:
            table.add_row(
                r["engine"],
                f"{r['step_ms']:.1f}",
                f"{r['forward_ms']:.1f} + {r['backward_ms']:.1f} + {r['optimizer_ms']:.1f}",
                f"{step['limit'] / r['step_ms']:.1%}" if "limit" in step else "",
                f"{step['fsdp2'] / r['step_ms']:.3f}x" if "fsdp2" in step else "",
                f"{r['tflops']:.0f}",
                f"{r['peak_gib']:.2f}",
                f"{r['reserved_gib']:.2f}",
                f"{r['device_gib']:.2f}",
                f"{r['between_steps_gib']:.2f}",
                f"{r['host_ms']:.1f}",
                f"{r['host_gib']:.1f}",
                f"{r['loss']:.4f}",
            )
        console.print(table)


if __name__ == "__main__":
    main()
