"""Draw what `peers.py` measured: step time against the limit, and memory.

python benchmarks/plot.py benchmarks/measured/2026-11-29-h200x2-run22-rows.jsonl docs/images/peers.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    results = [json.loads(line) for line in options.results.read_text().splitlines()]
    works = list(dict.fromkeys(r["work"] for r in results))
    works = [work for work in works if {"limit", "fsdp2"} < {r["engine"] for r in results if r["work"] == work}]
    figure, axes = plt.subplots(2, len(works), figsize=(4.2 * len(works), 6), squeeze=False)
    for column, work in enumerate(works):
        rows = [r for r in results if r["work"] == work]
        bars(axes[0][column], rows, "step_ms", f"{work}: ms a step")
        bars(axes[1][column], rows, "device_gib", "GiB taken on a card")
    figure.suptitle(f"{results[0]['world']} x {results[0]['card']}, torch {results[0]['torch']}")
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)


def bars(axis: Any, rows: list[dict[str, Any]], key: str, title: str) -> None:
    """Draw one bar an engine, with its value."""
    names = [r["engine"] for r in rows]
    colors = ["#9aa0a6" if name == "limit" else "#4c78a8" if "ourshard" in name else "#d9a441" for name in names]
    drawn = axis.bar(names, [r[key] for r in rows], color=colors)
    axis.bar_label(drawn, fmt="%.1f", fontsize=8)
    axis.margins(y=0.1)  # room for the label of the highest
    axis.set_title(title, fontsize=9)
    axis.tick_params(axis="x", labelsize=8, rotation=20)  # seven names side by side


if __name__ == "__main__":
    main()
