"""Train the largest model that fits one GPU with so much host memory, beside FSDP2 and DeepSpeed.

    python benchmarks/largest.py --gpu h100 --host-gib 100

Layers of Llama 8B are stacked (`llama-4096-x<layers>` of works.py, recomputed). The planner says how many fit, and
which part of the optimizer leaves the device then (`offload.optimizer_ratio`); that takes a minute and no GPU. With
`--layers` and `--ratio` it is not asked. All engines train that model, and the table shows what each takes of the host.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from ourshard.config import ShardConfig
from ourshard.planning.hardware import GIB, Hardware, hardware_of
from ourshard.planning.model import make_batch
from ourshard.planning.plan import Planner, Row, Workload
from peers import run_all, show
from works import work_named

FEW, MORE = 8, 16  # layers that bytes are planned of; between and beyond, they are on a line
RESERVE = 6  # GiB of the host for the process itself: Python, torch, the CUDA context
SLACK = 0.06  # of a card, for what its allocator can't use


@dataclass(frozen=True, slots=True)
class Choice:
    """How many layers fit with a part of the optimizer on the host."""

    ratio: float
    by_device: int
    by_host: int

    @property
    def layers(self) -> int:
        return min(self.by_device, self.by_host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--host-gib", type=float, default=100.0)
    parser.add_argument("--layers", type=int, help="do not ask the planner")
    parser.add_argument("--ratio", type=float, help="with --layers")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--engines", nargs="+", default=["ourshard3_offload_all_part", "fsdp2_offload"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--timeout", type=int, default=90, help="seconds for one engine")
    parser.add_argument("--out", type=Path, default=Path("out/largest.jsonl"))
    options = parser.parse_args()
    options.gpus, options.absent, options.profile = 1, 0, False
    layers, ratio = options.layers, options.ratio
    if layers is None:
        choice = largest(hardware_of(options.gpu, 1), options.host_gib - RESERVE)
        layers, ratio = choice.layers, choice.ratio
    work = work_named(f"llama-4096-x{layers}")
    print(f"{layers} layers, {work.parameters / 1e9:.2f}B parameters, optimizer_ratio {ratio:.2f}", flush=True)
    if options.plan_only:
        return
    os.environ["BENCH_RATIO"] = str(ratio)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    show(run_all(options.engines, work.name, options))


def largest(hardware: Hardware, host_gib: float) -> Choice:
    """Return the ratio with which most layers fit: the more leaves, the more the device has room for, and the host not.

    By halving: there is one ratio at which both are full.
    """
    low, high, best = 0.0, 1.0, Choice(1.0, 0, 0)
    planners = {layers: planner_of(layers, hardware) for layers in (FEW, MORE)}
    for _ in range(6):
        ratio = (low + high) / 2 if best.by_host else 1.0
        rows = {layers: row_of(planner, ratio) for layers, planner in planners.items()}
        device = {layers: row.memory.peak for layers, row in rows.items()}
        host = {layers: row.memory.host for layers, row in rows.items()}
        found = Choice(ratio, fitting(device, hardware.memory * (1 - SLACK)), fitting(host, host_gib * GIB))
        print(f"ratio {ratio:.3f}: {found.by_device} layers fit the device, {found.by_host} the host", flush=True)
        best = max(best, found, key=lambda choice: choice.layers)
        if found.by_host < found.by_device:
            high = ratio
        else:
            low = ratio
    return best


def planner_of(layers: int, hardware: Hardware) -> Planner:
    work = work_named(f"llama-4096-x{layers}")
    with torch.device("meta"):
        model = work.build()
    return Planner(model, Workload(make_batch(model, work.batch, work.seq), accelerate=False), hardware)


def row_of(planner: Planner, ratio: float) -> Row:
    precision = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    offload = {"optimizer": "cpu", "params": "cpu", "optimizer_ratio": ratio}
    config = {"stage": 3, "activation_checkpointing": True, "precision": precision, "offload": offload}
    return planner.row(ShardConfig.from_dict(config))


def fitting(nbytes: dict[int, int], room: float) -> int:
    """Return how many layers fit, on the line through the bytes of two numbers of them."""
    each = (nbytes[MORE] - nbytes[FEW]) / (MORE - FEW)
    return int((room - nbytes[FEW]) / max(each, 1) + FEW)


if __name__ == "__main__":
    main()
