"""The summary that `ShardMonitorCallback` writes at the end: one picture, and a page with it and the figures."""

from __future__ import annotations

import base64
import html
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from ourshard.trainer_callbacks.monitor import INPUTS, WAITS

NAME = "shard_monitor"
Row = dict[str, float]


def write(folder: Path, rows: list[Row], wire: dict[str, float]) -> None:
    """Write `shard_monitor.png` and `shard_monitor.html` into `folder`; `wire` has bytes a step by collective."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{NAME}.png"
    draw(rows, wire).savefig(picture, dpi=110)
    image = base64.b64encode(picture.read_bytes()).decode()
    page = (
        f"<!doctype html><meta charset=utf-8><title>{NAME}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}"
        "th:first-child,td:first-child{text-align:left}img{max-width:100%}</style>"
        f"<h1>{len(rows)} logs, to step {rows[-1]['step']:g}</h1>"
        f'<img alt="figures by step" src="data:image/png;base64,{image}">'
        f"{_table(('figure', 'median', 'least', 'most', 'last'), _figures(rows))}"
        f"{_table(('collective/axis', 'MB a step'), [(name, f'{n / 1e6:.3f}') for name, n in sorted(wire.items())])}"
    )
    (folder / f"{NAME}.html").write_text(page, encoding="utf-8")


def draw(rows: list[Row], wire: dict[str, float]) -> Figure:
    """Draw what there is: curves by step, memory by kind at the last log, bytes by collective."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, 3).flat
    _curves(next(panels), "loss and gradient norm", rows, ("loss", "grad_norm"))
    _curves(next(panels), "tokens a second, all ranks", rows, ("tokens_per_second",))
    if "mfu" in rows[-1]:
        _curves(next(panels), "share of the peak (mfu)", rows, ("mfu",))
    else:
        _curves(next(panels), "a step, ms", rows, ("step_ms",))
    _curves(next(panels), "waiting, ms a step", rows, (*WAITS, *INPUTS))
    memory = {name[len("memory_") : -len("_mb")]: rows[-1][name] for name in rows[-1] if name.startswith("memory_")}
    _bars(next(panels), "most held at once, MB", memory)
    _bars(next(panels), "on the wire, MB a step", {name: number / 1e6 for name, number in wire.items()})
    return figure


def _curves(panel: Any, title: str, rows: list[Row], names: Iterable[str]) -> None:
    panel.set_title(title)
    panel.set_xlabel("step")
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            panel.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "")
    if panel.lines:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
    if len(panel.lines) > 1:  # one says in its title what it is
        panel.legend(frameon=False)
    panel.grid(alpha=0.3)


def _bars(panel: Any, title: str, values: dict[str, float]) -> None:
    panel.set_title(title)
    panel.barh(list(values), list(values.values()))
    panel.grid(alpha=0.3, axis="x")


def _figures(rows: list[Row]) -> list[tuple[str, ...]]:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    found = []
    for name in names:
        values = [row[name] for row in rows if name in row]
        shown = (statistics.median(values), min(values), max(values), values[-1])
        found.append((name, *(f"{value:.4g}" for value in shown)))
    return found


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["".join(f"<th>{html.escape(text)}" for text in head)]
    lines += ["".join(f"<td>{html.escape(text)}" for text in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}" for line in lines) + "</table>"
