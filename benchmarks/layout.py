"""Print what the lane planner costs: padding, lanes and time for real units.

python benchmarks/layout.py [--worlds 1,8,64,512] [--align 16]
"""

from __future__ import annotations

import argparse
import time

from ourshard.runtime.layout import TensorSpec, plan_unit
from rich.console import Console
from rich.table import Table

Shape = tuple[int, ...]


def llama(hidden: int, kv: int, ffn: int) -> list[Shape]:
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return [*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]


def encoder(hidden: int, ffn: int) -> list[Shape]:
    projections = [shape for _ in range(4) for shape in ((hidden, hidden), (hidden,))]
    return [*projections, (ffn, hidden), (ffn,), (hidden, ffn), (hidden,), *[(hidden,)] * 4]


UNITS: dict[str, list[Shape]] = {
    "Llama 1B layer": llama(2048, 512, 8192),
    "Llama 8B layer": llama(4096, 1024, 14336),
    "Llama 70B layer": llama(8192, 1024, 28672),
    "GPT-2 layer": [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), *[(768,)] * 5],
    "ViT embeddings": [(1, 1, 768), (1, 197, 768), (768, 3, 16, 16), (768,)],
    "vision layer 1152x4304": encoder(1152, 4304),
    "128 experts, a tensor each": [
        *[(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)],
        *[(768, 2048), (768, 2048), (2048, 768)] * 128,
    ],
    "8 fused experts": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (8, 28672, 4096), (8, 4096, 14336)],
}


def row_of(shapes: list[Shape], worlds: list[int], align: int, fine_granules: bool) -> list[str]:
    specs = [TensorSpec(str(index), shape, None) for index, shape in enumerate(shapes)]
    numel = sum(spec.numel for spec in specs)
    cells = []
    for world in worlds:
        start = time.perf_counter()
        layout = plan_unit(specs, world, align=align, fine_granules=fine_granules)
        milliseconds = 1e3 * (time.perf_counter() - start)
        cells.append(f"{100 * layout.padding / numel:.2f}% {len(layout.lanes)} {milliseconds:.1f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,4,6,8,16,64,256,512,16384")
    parser.add_argument("--align", type=int, default=16)
    args = parser.parse_args()
    worlds = [int(world) for world in args.worlds.split(",")]
    table = Table("unit", *(f"{world} ranks" for world in worlds), title="padding, lanes, ms (first plan, not cached)")
    for name, shapes in UNITS.items():
        table.add_row(name, *row_of(shapes, worlds, args.align, fine_granules=False))
        if any(len(shape) > 2 for shape in shapes):
            table.add_row(f"{name}, fine granules", *row_of(shapes, worlds, args.align, fine_granules=True))
    Console(width=max(120, 30 + 18 * len(worlds))).print(table)


if __name__ == "__main__":
    main()
