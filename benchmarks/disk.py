"""Measure how fast a step from a disk moves masters and moments, beside a plain copy on that disk.

    python benchmarks/disk.py --folder /local/nvme --layers 16

One process on the CPU, no GPU. Each layer is a unit; a step of AdamW reads its master and two moments and writes them
back (12 bytes an element each way). The copy reads and writes the same bytes with O_DIRECT, one after the other, in
pieces of 8 MiB: what `dd iflag=direct oflag=direct bs=8M` does. The step of the CPU alone is that of `optimizer: cpu`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from ourshard.offload.file import DiskFile
from ourshard.runtime.api import engine_of, shard_model
from torch import nn

PIECE = 8 * 2**20


class Stack(nn.Module):
    """Linear layers without bias, each read by a row of ones."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="on the disk to measure")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    nbytes = 12 * options.layers * options.width**2
    host = step_seconds(options, {"optimizer": "cpu"})
    disk = step_seconds(options, {"optimizer": "nvme", "nvme_path": str(options.folder)})
    copy = statistics.median(copy_seconds(options.folder, nbytes) for _ in range(options.steps))
    print(f"{nbytes / 1e9:.2f} GB each way, {torch.get_num_threads()} threads")
    for name, seconds in (("step, all on the host", host), ("step from the disk", disk), ("copy", copy)):
        print(f"{name}: {seconds * 1e3:.0f} ms, {nbytes / seconds / 1e9:.2f} GB/s each way")
    print(f"the step moves bytes at {copy / disk:.0%} of the copy's pace")


def step_seconds(options: argparse.Namespace, offload: dict[str, str]) -> float:
    """Return the median seconds of `optimizer.step()`, the first left out."""
    model = shard_model(Stack(options.layers, options.width), {"stage": 3, "persist_below": 0, "offload": offload})
    assert engine_of(model) is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    times = []
    for _ in range(options.steps + 1):
        model(torch.ones(1, options.width)).sum().backward()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return statistics.median(times[1:])


def copy_seconds(folder: Path, nbytes: int) -> float:
    """Return the seconds of a plain copy of `nbytes`, both files there before."""
    file = DiskFile(folder, 2 * nbytes)
    if not file.is_direct:
        raise SystemExit(f"{folder}: its filesystem has no O_DIRECT")
    source, target = file.take(nbytes), file.take(nbytes)
    base = torch.zeros(PIECE + 4096, dtype=torch.uint8)
    buffer = base[-base.data_ptr() % 4096 :][:PIECE]
    for at in range(0, nbytes - PIECE + 1, PIECE):  # written once: reads of blocks without content cost nothing
        _wait(file.write(source + at, buffer))
        _wait(file.write(target + at, buffer))
    os.sync()
    start = time.perf_counter()
    for at in range(0, nbytes - PIECE + 1, PIECE):
        _wait(file.read(source + at, buffer))
        _wait(file.write(target + at, buffer))
    return time.perf_counter() - start


def _wait(moving: list) -> None:  # type: ignore[type-arg]
    for future in moving:
        future.result()


if __name__ == "__main__":
    main()
