"""A plan as a table, as JSON, and as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ourshard.planning.hardware import GB, GIB, Hardware
from ourshard.planning.plan import Row
from ourshard.runtime.wording import counted

_COLUMNS = (
    "{unit}",
    "states",
    "params",
    "grads",
    "activ.",
    "{unit} in node",
    "between",
    "step s",
    "tokens/s",
    "checkpoint",
)


class _Units(NamedTuple):
    """In what a table counts bytes: GiB, or MiB for models that a laptop trains."""

    name: str
    size: int

    @classmethod
    def for_rows(cls, rows: Sequence[Row]) -> _Units:
        return cls("GiB", GIB) if max(row.memory.peak for row in rows) >= GIB else cls("MiB", GIB // 1024)

    def text(self, nbytes: float) -> str:
        return f"{nbytes / self.size:.1f}"

    def decimal(self, nbytes: float) -> str:
        return f"{nbytes / GB:.0f} GB" if self.size == GIB else f"{1000 * nbytes / GB:.0f} MB"


def as_table(rows: Sequence[Row], hardware: Hardware, chosen: Row | None) -> Table:
    """Return the rows as a rich table; the chosen one is marked."""
    nodes = counted(hardware.nodes, "node")
    title = f"{hardware.gpus} x {hardware.name} in {nodes}, {hardware.memory / GIB:.0f} GiB each"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("configuration")
    of = _Units.for_rows(rows)
    elsewhere = [name for name in ("host", "disk") if any(getattr(row.memory, name) for row in rows)]
    for name in (*_COLUMNS, *(f"{name} {{unit}}" for name in elsewhere)):
        table.add_column(name.format(unit=of.name), justify="right", no_wrap=True)
    for row in rows:
        best, worst = row.seconds
        table.add_row(
            "*" if row is chosen else "" if row.fits else "too big",
            row.name,
            of.text(row.memory.peak),
            of.text(row.memory.masters + row.memory.optimizer),
            of.text(row.memory.whole + row.memory.slots),
            of.text(row.memory.gradients),
            of.text(row.memory.activations),
            of.text(row.wire_inside),
            of.text(row.wire_between),
            f"{row.timing.total:.3g} ({best:.3g} to {worst:.3g})",
            f"{row.tokens_per_second:,.0f}",
            f"{of.decimal(row.checkpoint)}, {row.checkpoint_seconds:.0f} s",
            *(of.text(getattr(row.memory, name)) for name in elsewhere),
            style="bold" if row is chosen else None if row.fits else "dim",
        )
    return table


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row as plain values; bytes and seconds."""
    best, worst = row.seconds
    return {
        "name": row.name,
        "fits": row.fits,
        "config": row.config.to_dict(),
        "codecs": row.codecs,
        "memory": {
            **row.memory.parts,
            "peak": row.memory.peak,
            "at_rest": row.memory.at_rest,
            "host": row.memory.host,
            "pinned": row.memory.pinned,
            "disk": row.memory.disk,
        },
        "wire": {"inside_node": row.wire_inside, "between_nodes": row.wire_between},
        "seconds": {
            "step": row.timing.total,
            "best": best,
            "worst": worst,
            "compute": row.timing.compute,
            "optimizer": row.timing.step,
            "exposed": row.timing.exposed,
            "waiting_for_host": row.timing.starved,
        },
        "tokens_per_second": row.tokens_per_second,
        "checkpoint": {"nbytes": row.checkpoint, "seconds": row.checkpoint_seconds},
    }


def check_picture(path: Path, option: str) -> None:
    """Raise ValueError if no picture can be drawn to `path`, which `option` gave: before the plan, which takes long."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib.") from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{option}: {path} has none of the endings {', '.join(known)}.")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_memory(rows: Sequence[Row], hardware: Hardware, path: Path) -> None:
    """Draw one bar a row, stacked by what the memory is for, with the limit of the GPU."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.34 * len(rows)), layout="constrained")
    names = [row.name for row in rows]
    left = [0.0] * len(rows)
    for part in rows[0].memory.parts:
        sizes = [row.memory.parts[part] / GIB for row in rows]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=part, height=0.7)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(hardware.memory / GIB, color="black", linestyle="--", linewidth=1)
    axes.text(
        hardware.memory / GIB,
        -0.7,
        f"{hardware.name}: {hardware.memory / GIB:.0f} GiB",
        ha="center",
        va="bottom",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the line
    )
    axes.invert_yaxis()
    axes.set_xlim(0, max(*left, hardware.memory / GIB) * 1.02)
    axes.set_xlabel("GiB on each GPU when most is allocated")
    figure.legend(fontsize=8, ncols=7, loc="outside lower center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def plot_scaling(curves: Mapping[str, Mapping[int, Row]], path: Path) -> None:
    """Draw tokens a second of one GPU over the number of GPUs, one line a configuration, with the error as a band.

    Configurations of the same speed have one line and one entry of the legend.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, rows in _merged(curves).items():
        counts = sorted(rows)
        middle = [rows[count].tokens_per_second / count for count in counts]
        scale = [rows[count].timing.total for count in counts]
        low = [m * s / rows[c].seconds[1] for m, s, c in zip(middle, scale, counts, strict=True)]
        high = [m * s / rows[c].seconds[0] for m, s, c in zip(middle, scale, counts, strict=True)]
        (line,) = axes.plot(counts, middle, marker="o", markersize=3, label=name)
        axes.fill_between(counts, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens a second and GPU")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _merged(curves: Mapping[str, Mapping[int, Row]]) -> dict[str, Mapping[int, Row]]:
    """Join the names of curves that no eye could tell apart."""
    merged: dict[str, Mapping[int, Row]] = {}
    for name, rows in curves.items():
        twin = next((other for other, drawn in merged.items() if _alike(rows, drawn)), None)
        merged[name if twin is None else f"{twin}; {name}"] = merged.pop(twin) if twin is not None else rows
    return merged


def _alike(one: Mapping[int, Row], other: Mapping[int, Row]) -> bool:
    return all(math.isclose(one[n].tokens_per_second, other[n].tokens_per_second, rel_tol=0.005) for n in one)
