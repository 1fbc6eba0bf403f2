"""`ShardProfilerCallback`: a window of torch's profiler, a trace of each rank, and a table of where steps went."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from ourshard.runtime import timeline
from ourshard.runtime.api import engine_of
from ourshard.values import is_number
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

logger = logging.getLogger("ourshard")

COLUMNS = ("forward", "backward", "gather", "reduce")  # of a unit, by the engine's ranges


@dataclass(slots=True)
class Profile:
    """What one rank recorded, milliseconds a step."""

    step_ms: float
    parts: dict[str, float]  # in the words of `timeline.PARTS`
    groups: dict[str, float]
    units: dict[str, dict[str, float]]  # unit -> column -> time; `COLUMNS`


class ShardProfilerCallback(TrainerCallback):
    """Records `active` steps, after `wait` steps without and `warmup` steps with a profiler whose records are dropped.

    Each rank writes `trace-rank-N.json.gz` into `folder`, for Perfetto or chrome://tracing. Rank 0 prints a table of
    all ranks, and writes it with the times of each unit as `profile.json`. Outside of the window nothing is recorded.
    Training is not changed. Without ourshard there are no units. Where Kineto recorded nothing (it drops what its
    clock puts out of the window), a warning names the ranks and there is no table.

    Args:
        wait: optimizer steps without a profiler, counted from where training begins or goes on.
        warmup: steps with one whose records are dropped.
        active: steps that are recorded.
        folder: where to; by default `profile` in `output_dir`.

    Raises:
        ValueError: `active` is not above 0, or another is below 0.
    """

    def __init__(self, wait: int = 5, warmup: int = 2, active: int = 3, folder: str | Path | None = None) -> None:
        whole = all(is_number(steps, whole=True) for steps in (wait, warmup, active))
        if not whole or wait < 0 or warmup < 0 or active < 1:
            raise ValueError(
                f"ShardProfilerCallback(wait={wait!r}, warmup={warmup!r}, active={active!r}): whole numbers of steps, "
                "active 1 or more, the others 0 or more."
            )
        self.wait, self.warmup, self.active = wait, warmup, active
        self.folder = None if folder is None else Path(folder)
        self.profiles: list[Profile] = []  # of all ranks, once the window is over
        self._begun = 0  # steps of this training
        self._recording: Any = None
        self._mine: Profile | None = None
        self._rank = 0

    # ---- events --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count steps."""
        self._begun = 0
        self._stop()  # of a training that raised
        self._mine, self.profiles, self._rank = None, [], args.process_index
        self.folder = self.folder or Path(args.output_dir, "profile")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the profiler where its window begins."""
        self._begun += 1
        if self._begun == self.wait + 1:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            steps = schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
            self._recording = profile(activities=activities, schedule=steps, on_trace_ready=self._take)
            self._recording.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Go on with the window; show the table where it ends."""
        if self._recording is None:
            return
        self._recording.step()
        if self._is_over:
            self._stop()
            self._tell(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the profiler, should its window not be over."""
        if self._recording is not None and state.is_world_process_zero:
            logger.warning("ShardProfilerCallback: training ended before its window did; there is no table.")
        self._stop()

    # ---- what was recorded ---------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """Say whether the window has come to its last step."""
        return self._begun >= self.wait + self.warmup + self.active

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _take(self, recorded: Any) -> None:
        """Keep the window's records: torch calls it at the end of the window, and at `stop` of one that was cut."""
        if not self._is_over:
            return
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.folder / f"trace-rank-{self._rank}.json.gz"))
        self._mine = read(recorded.profiler.kineto_results.events(), self.active)

    def _tell(self, model: Any) -> None:
        """Gather the profiles of all ranks, and show them on rank 0. Collective."""
        engine, mine = engine_of(model), self._mine
        found: Any = gather_object([mine]) if engine is None else engine.control.gather_objects(mine, "profiles")
        without = [rank for rank, each in enumerate(found) if each is None]
        self.profiles = [] if without else list(found)
        if without and self._rank == 0:
            logger.warning("ShardProfilerCallback: torch's profiler recorded no step on ranks %s; no table.", without)
        elif self._rank == 0:
            assert self.folder is not None
            told = [asdict(each) for each in self.profiles]
            (self.folder / "profile.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            show(self.profiles, self.folder)


def read(events: Any, steps: int) -> Profile | None:
    """Return where `steps` steps went, by what Kineto recorded of this rank; None where it recorded no step."""
    on_gpu = any(_is_kernel(event) for event in events)
    spans: dict[str, list[timeline.Span]] = defaultdict(list)
    units: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    bounds: list[float] = []
    for event in events:
        name, start = event.name(), event.start_ns() / 1e6
        span = (start, start + event.duration_ns() / 1e6)
        device = event.device_type().name
        if name.startswith("ProfilerStep") and device == "CPU":
            bounds += span
        kernel = _is_kernel(event)
        group = timeline.gpu_group_of(name) if kernel else None if on_gpu else timeline.cpu_group_of(name)
        if group is not None and span[1] > span[0]:
            spans[group].append(span)
        verb, _, unit = name.removeprefix(timeline.RANGE).partition(" ")
        if name.startswith(timeline.RANGE) and verb in COLUMNS and (device != "CPU") == on_gpu:
            units[unit][verb] += (span[1] - span[0]) / steps
    if not on_gpu and not bounds:
        return None
    order = timeline.GPU_ORDER if on_gpu else timeline.CPU_ORDER
    whole = None if on_gpu else (min(bounds), max(bounds))
    found = timeline.shares(spans, order, steps, whole)
    return Profile(found.step_ms, found.parts(), found.share_ms, {unit: dict(times) for unit, times in units.items()})


def _is_kernel(event: Any) -> bool:
    """Say whether a GPU was at work, which it need not be in the ranges that Kineto draws on its line, too."""
    return event.device_type().name == "CUDA" and not event.is_user_annotation()


def show(profiles: list[Profile], folder: Path) -> None:
    """Print where the steps went: rank 0, and the least and the most of all ranks; then the units of rank 0."""
    console, first = Console(width=110), profiles[0]
    table = Table(title=f"{first.step_ms:.2f} ms a step on rank 0; traces are in {folder}")
    for column in ("part", "rank 0, ms", "of the step", "least, ms", "most, ms"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, value in first.parts.items():
        all_ranks = [each.parts[part] for each in profiles]
        share = f"{value / first.step_ms:.0%}"
        table.add_row(part, f"{value:.2f}", share, f"{min(all_ranks):.2f}", f"{max(all_ranks):.2f}")
    console.print(table)
    if first.units:
        table = Table(title="units of rank 0, ms a step")
        for column in ("unit", *COLUMNS):
            table.add_column(column, justify="left" if column == "unit" else "right")
        for unit, times in first.units.items():
            table.add_row(unit, *(f"{times.get(column, 0.0):.2f}" for column in COLUMNS))
        console.print(table)
