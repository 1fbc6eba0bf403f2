"""Print the bandwidth of the codecs beside that of a plain copy.

python benchmarks/codec.py [--device cuda] [--mib 512] [--block ELEMENTS] [--sweep]

Bandwidth counts every byte read and written once. "of copy": of that of a copy which moves as many bytes; it is to be
80% or more.
Blocks are as training has them where the config does not say, or of `--block` elements. With `--sweep` sums and
stochastic rounding are timed for several shapes of their tiles instead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from ourshard.config import BLOCKS, Codec
from ourshard.runtime.codec import BlockCodec
from rich.console import Console
from rich.table import Table
from torch import Tensor

PARTS = 8
FLUSHES = 10  # of 256 MiB each: about a millisecond


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of one call. On CUDA the L2 cache is overwritten between calls.

    That takes the device longer than the host needs to start the call, whose time begins when the device is ready.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(_host_seconds(run) for _ in range(repeats))
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    times = []
    for _ in range(repeats):
        for _ in range(FLUSHES):
            flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def _host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@functools.cache
def copy_seconds(nbytes: int, device: torch.device, repeats: int) -> float:
    """Return the time of a copy that reads half of `nbytes` and writes the other half."""
    source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return seconds_of(lambda: target.copy_(source), device, repeats)


def cases(codec: BlockCodec, values: Tensor) -> dict[str, tuple[Callable[[], None], int]]:
    """Return what to time, with the bytes that each call reads and writes."""
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    result = torch.empty_like(values)
    part_numel = values.numel() // PARTS
    total = torch.empty(part_numel, dtype=torch.float32, device=values.device)
    return {
        "encode": (lambda: codec.encode(values, message, seed=1), values.nbytes + message.nbytes),
        "decode": (lambda: codec.decode(message, result), message.nbytes + result.nbytes),
        f"decode_sum of {PARTS}": (
            lambda: codec.decode_sum(message, total, 0.5, parts=PARTS),
            message.nbytes + total.nbytes,
        ),
    }


def rows_of(
    dtype: torch.dtype, numel: int, block: int | None, device: torch.device, repeats: int
) -> Iterator[list[str]]:
    """Time a copy and every codec for one dtype; yield the rows of the table."""
    values = torch.randn(numel, device=device).to(dtype)
    for kind, stochastic in itertools.product((Codec.INT8, Codec.INT4, Codec.FP8), (False, True)):
        label = f"{kind.value}, {block or BLOCKS[kind]}" + (", stochastic" if stochastic else "")
        for call, (run, nbytes) in cases(BlockCodec(kind, block or BLOCKS[kind], stochastic), values).items():
            if stochastic and call != "encode":
                continue
            seconds, copying = seconds_of(run, device, repeats), copy_seconds(nbytes, device, repeats)
            rates = [f"{nbytes / taken / 1e9:.1f}" for taken in (seconds, copying)]
            yield [str(dtype), label, call, f"{1e3 * seconds:.3f}", *rates, f"{copying / seconds:.0%}"]


def sweep(values: Tensor, block: int | None, device: torch.device, repeats: int) -> Table:
    """Time sums and stochastic rounding for several tiles, warps, and parts whose loads are under way at once."""
    from ourshard.runtime import codec_triton

    table = Table("codec", "call", "tile", "warps", "together", "ms", title=f"{values.numel()} {values.dtype}")
    for kind, stochastic in ((Codec.INT8, False), (Codec.INT4, False), (Codec.INT8, True)):
        codec = BlockCodec(kind, block or BLOCKS[kind], stochastic)
        name, (run, _) = list(cases(codec, values).items())[0 if stochastic else -1]
        parts = (1,) if stochastic else (4, 8)
        for tile, warps, together in itertools.product((2048, 4096, 8192), (4, 8), parts):
            codec_triton.TILE_NUMEL, codec_triton.TOGETHER = tile, together
            codec_triton.WARPS = codec_triton.SUM_WARPS = warps
            seconds = seconds_of(run, device, repeats)
            label = kind.value + (", stochastic" if stochastic else "")
            table.add_row(label, name, str(tile), str(warps), str(together), f"{1e3 * seconds:.4f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, default=512, help="MiB of float32 source; bfloat16 takes half")
    parser.add_argument("--block", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="CUDA only")
    args = parser.parse_args()
    device = torch.device(args.device)
    numel = args.mib * (1 << 20) // 4
    if args.sweep:
        Console(width=120).print(sweep(torch.randn(numel, device=device).bfloat16(), args.block, device, args.repeats))
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"{name}; {numel} elements"
    table = Table("dtype", "codec", "call", "ms", "GB/s", "copy GB/s", "of copy", title=title)
    for dtype in (torch.bfloat16, torch.float32):
        for row in rows_of(dtype, numel, args.block, device, args.repeats):
            table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
