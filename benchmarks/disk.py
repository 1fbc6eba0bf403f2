"""Measure how fast a step from a disk moves masters and moments, beside a plain copy on that disk.

    python benchmarks/disk.py --folder /local/nvme --seconds 45

One process. First the disk is tried: a file is written and read with O_DIRECT, one piece of 8 MiB
after the other (what `dd oflag=direct bs=8M` does), and with the 8 threads that a step has. Then a stack of layers, as
many as the disk moves in the time that is left, is trained: a step of AdamW reads each master and two moments and
writes them back (12 bytes an element each way). Every line is printed as soon as it is known; two layers and two steps
are the least, else nothing begins that would not end in `--seconds`. Each layer is a unit, and so passes by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
from ourshard.offload.file import PIECE, DiskFile
from ourshard.runtime.api import engine_of, shard_model
from torch import nn

LARGEST = 2 * 2**30  # bytes that the disk is tried with
EACH = {"stage": 3, "persist_below": 0, "wrap": {"classes": ["Linear"], "merge": 0}}
STEPS = 4  # of which the first takes space for the moments


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
    parser.add_argument("--seconds", type=float, default=45.0, help="in all")
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    say(f"{options.folder}, {torch.get_num_threads()} threads")
    copied = copy_rate(options.folder, options.seconds * 0.3)
    layer = 12 * options.width**2
    # A step reads and writes once; the masters are written when the model is sharded.
    passes = (end - time.perf_counter()) * 0.3 / (STEPS + 1)
    layers = min(32, max(2, int(copied * passes / layer)))
    seconds = step_seconds(layers, options, end)
    rate = layers * layer / seconds
    say(f"step from the disk, {layers} layers: {seconds * 1e3:.0f} ms, {rate / 1e9:.2f} GB/s each way")
    say(f"the step moves bytes at {rate / copied:.0%} of the pace of a copy")


def copy_rate(folder: Path, seconds: float) -> float:
    """Say the rates of the disk; return the bytes a second of a copy, which reads and then writes each piece."""
    file = DiskFile(folder, LARGEST)
    say(f"O_DIRECT: {'yes' if file.is_direct else 'no, the filesystem refuses it: rates are of the page cache'}")
    base = torch.zeros(8 * PIECE + 4096, dtype=torch.uint8)
    buffer = base[-base.data_ptr() % 4096 :][: 8 * PIECE]
    file.take(LARGEST)
    rates = {}
    for name, move, width in (
        ("write", file.write, 1),
        ("read", file.read, 1),
        ("write, 8 threads", file.write, 8),
        ("read, 8 threads", file.read, 8),
    ):
        moved, start = 0, time.perf_counter()
        for at in range(0, LARGEST, width * PIECE):
            wait(move(at, buffer[: width * PIECE]))
            moved = at + width * PIECE
            if time.perf_counter() - start > seconds / 4:
                break
        rates[name] = moved / (time.perf_counter() - start)
        say(f"{name}: {rates[name] / 1e9:.2f} GB/s over {moved / 2**20:.0f} MiB")
    return 1 / (1 / rates["read"] + 1 / rates["write"])


def step_seconds(layers: int, options: argparse.Namespace, end: float) -> float:
    """Return the median seconds of `optimizer.step()`, without the first, which makes moments and touches buffers."""
    offload = {"optimizer": "nvme", "nvme_path": str(options.folder)}
    model = shard_model(Stack(layers, options.width), {**EACH, "offload": offload})
    engine = engine_of(model)
    assert engine is not None
    ones = torch.ones(1, options.width, device=engine.mesh.device)  # a GPU, where there is one
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    times = []
    for number in numbers_until(end):
        model(ones).sum().backward()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
        say(f"step {number}: {times[-1] * 1e3:.0f} ms")
    return statistics.median(times[1:])


def numbers_until(end: float) -> Iterator[int]:
    """Count steps up to `STEPS`, two at least, while one more as long as the longest since the first ends in time."""
    longest = 0.0
    for number in range(STEPS):
        start = time.perf_counter()
        if number > 1 and start + longest > end:
            return
        yield number
        longest = max(longest, time.perf_counter() - start) if number else 0.0


def wait(moving: list[Future[None]]) -> None:
    for future in moving:
        future.result()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
