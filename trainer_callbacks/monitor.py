"""`ShardMonitorCallback`: speed, waiting, memory and traffic of a run, in the Trainer's logs and in a summary."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from ourshard.config import Tier
from ourshard.integrations.trainer_events import ShardTrainerCallback
from ourshard.planning.hardware import peak_flops_of
from ourshard.runtime.api import engine_of
from ourshard.runtime.engine import Engine
from ourshard.runtime.meter import Spent, Totals, seconds_of, since
from ourshard.trainer_callbacks.flops import Flops
from ourshard.values import is_number
from torch import nn

logger = logging.getLogger("ourshard")

MB = 10**6
AGREE = {"agree_ms": Spent.AGREE}
WAITS = {"exposed_gather_ms": Spent.GATHER, "exposed_reduce_ms": Spent.REDUCE, **AGREE}
INPUTS = {"exposed_input_ms": Spent.INPUT}  # where inputs of units are on the host


@dataclass(slots=True)
class Window:
    """What one rank saw since the last log."""

    steps: int = 0
    seconds: float = 0.0  # of steps with their data; evaluations and saves are left out
    tokens: int = 0
    flops: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)  # seconds, by the names of `WAITS` and `INPUTS`
    wire: dict[str, int] = field(default_factory=dict)  # bytes, by "collective/axis"
    memory: dict[str, int] = field(default_factory=dict)  # most bytes at once so far, by kind


class ShardMonitorCallback(ShardTrainerCallback):
    """Adds figures of all ranks, the same on each, to each training log, so that every tracker of the Trainer has them.

    The ranks tell each other a few numbers at logging steps, and wait for the GPU there; between them nothing waits.
    Training is not changed. Without ourshard it has the speed alone.

    Args:
        summary: write `shard_monitor.png` and `shard_monitor.html` into `output_dir` at the end, on rank 0.
        peak_flops: operations a second that one device could do, for `mfu`; by default the 16-bit peak of the GPU's
            data sheet. A CPU has none unless it is given.
        flops_per_token: of forward and backward, without recomputation; by default counted as in `flops.py`.

    Raises:
        ValueError: a summary is asked for and matplotlib is not installed, or a figure is not above 0.
    """

    def __init__(
        self, summary: bool = True, peak_flops: float | None = None, flops_per_token: float | None = None
    ) -> None:
        self.require_events()
        for name, value in (("peak_flops", peak_flops), ("flops_per_token", flops_per_token)):
            if value is not None and not (is_number(value) and value > 0):
                raise ValueError(f"ShardMonitorCallback: {name} is {value!r}; give a number above 0, or leave it out.")
        if summary and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "ShardMonitorCallback draws its summary with matplotlib, which is not installed: install it, or give "
                "summary=False."
            )
        self.summary, self.peak_flops, self.flops_per_token = summary, peak_flops, flops_per_token
        self.rows: list[dict[str, float]] = []  # one a log, with step and loss
        self.wire: dict[str, float] = {}  # bytes a step of the last window, by "collective/axis"
        self._figures: dict[str, float] = {}  # for the log that comes next
        self._window = Window()
        self._mark = 0.0  # when the current step's time began
        self._flops: Flops | None = None
        self._before: tuple[Totals, Counter[str]] = ({}, Counter())  # of meter and ledger at the last log
        self._measured: Engine | None = None
        self._hook: Any = None

    # ---- events --------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the model that is about to be sharded count its bytes."""
        plugin = AcceleratorState._shared_state.get("ourshard_plugin")
        if plugin is not None:
            plugin.counts = True

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to count and to measure."""
        self._end()  # of a training that raised
        self._window, self._before, self._figures = Window(), ({}, Counter()), {}
        engine = engine_of(model)
        self._flops = Flops(model, self.flops_per_token)
        self.peak_flops = self.peak_flops or _peak(state.is_world_process_zero)
        if self.peak_flops and self._flops.unknown and state.is_world_process_zero:
            logger.warning("ShardMonitorCallback: no mfu: %s. Give flops_per_token.", self._flops.unknown)
        if engine is not None:
            engine.measuring.start(parts=False)
            self._measured = engine
            if engine.ledger is not None:
                self._before = {}, Counter(engine.ledger.wire)
            elif state.is_world_process_zero:
                logger.warning(
                    "ShardMonitorCallback: no bytes by kind and on the wire: it was added after the Trainer was made. "
                    "Give it to the constructor, or set ledger: true in the ourshard config."
                )
        count = torch._dynamo.disable(self._count)  # a compiled model would guard on the counts
        self._hook = model.register_forward_pre_hook(count, with_kwargs=True)
        self._mark = time.perf_counter()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Take the step in; at a logging step ask the other ranks."""
        self._window.steps += 1
        engine = engine_of(model)
        if control.should_log:
            _finish_device()
        elif engine is not None and engine.measuring.meter is not None:
            engine.measuring.meter.totals()  # let go of what has passed
        now = time.perf_counter()
        self._window.seconds += now - self._mark
        self._mark = now
        if control.should_log:
            self._ask(engine, optimizer)

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Ask the other ranks where epochs are logged."""
        if control.should_log and self._window.steps:
            _finish_device()
            self._ask(engine_of(model), optimizer)

    def before_log(self, state: Any, logs: dict[str, Any]) -> None:
        """Add the figures to a log of training."""
        if "loss" in logs and self._figures:
            logs.update(self._figures)
            kept: dict[str, float] = {name: logs[name] for name in ("loss", "grad_norm") if name in logs}
            self.rows.append({"step": state.global_step, **kept, **self._figures})
            self._figures = {}

    @contextmanager
    def around_evaluation(self, model: nn.Module) -> Iterator[None]:
        """Leave the time and the bytes of an evaluation out."""
        ledger = self._measured.ledger if self._measured is not None else None
        before = Counter(ledger.wire) if ledger is not None else Counter()
        yield
        self._mark = time.perf_counter()
        if ledger is not None:
            self._before[1].update(ledger.wire - before)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the time of a save out."""
        self._mark = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop measuring, and write the summary."""
        self._end()
        if self.summary and self.rows and state.is_world_process_zero:
            from ourshard.trainer_callbacks.monitor_summary import write

            write(Path(args.output_dir), self.rows, self.wire)

    def _end(self) -> None:
        if self._measured is not None:
            self._measured.measuring.stop(parts=False)
            self._measured = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ---- figures -------------------------------------------------------------------------------------------

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of a training forward, padding too: reading the mask would make the host wait."""
        if module.training and torch.is_grad_enabled():
            assert self._flops is not None
            tokens, flops = self._flops.of_call(module, args, kwargs)
            self._window.tokens += tokens
            self._window.flops += flops

    def _ask(self, engine: Engine | None, optimizer: Any) -> None:
        """Make the figures of this window, with those of all ranks. Collective."""
        mine, self._window = self._window, Window()
        if engine is not None and engine.measuring.meter is not None:
            totals, wire = engine.measuring.meter.totals(), Counter(engine.ledger.wire if engine.ledger else {})
            spent = since(totals, self._before[0])
            kinds = AGREE if engine.config.cuda_graph else WAITS  # within a replay nothing can be measured
            if engine.inputs is not None:
                kinds = kinds | INPUTS
            mine.waits = {name: seconds_of(spent, kind) for name, kind in kinds.items()}
            mine.wire = dict(wire - self._before[1])
            mine.memory = dict(engine.ledger.peak) if engine.ledger else {}
            if engine.ledger and engine.config.offload.optimizer is Tier.NONE:  # else the ledger has those on the host
                mine.memory["states"] = _bytes_of_states(optimizer)
            self._before = totals, wire
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            mine.memory["allocated"] = torch.cuda.max_memory_allocated()
        told: list[Any] = gather_object([mine]) if engine is None else engine.control.gather_objects(mine, "monitor")
        self.wire = {name: number / mine.steps for name, number in mine.wire.items()}
        self._figures = figures(told, self.peak_flops if self._flops and not self._flops.unknown else None)


def figures(told: list[Window], peak_flops: float | None) -> dict[str, float]:
    """Return what is logged, from the windows of all ranks."""
    steps, seconds = told[0].steps, max(window.seconds for window in told)
    found = {"step_ms": 1e3 * seconds / steps}
    tokens, flops = sum(window.tokens for window in told), sum(window.flops for window in told)
    if tokens:
        found["tokens_per_second"] = tokens / seconds
    if peak_flops and flops:
        found["mfu"] = flops / seconds / (peak_flops * len(told))
    for name in told[0].waits:
        found[name] = 1e3 * sum(window.waits[name] for window in told) / len(told) / steps
    if told[0].wire:
        found["wire_mb"] = max(sum(window.wire.values()) for window in told) / steps / MB
    memory = {name: max(window.memory[name] for window in told) / MB for name in told[0].memory}
    return found | {f"memory_{name}_mb": held for name, held in memory.items() if held}


def _bytes_of_states(optimizer: Any) -> int:
    """Return what an optimizer keeps of the parameters that it steps: two values an element for Adam."""
    states = getattr(optimizer, "state", {}).values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _finish_device() -> None:
    """Wait for the GPU, as the Trainer does next for the loss that it logs."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak(says: bool) -> float | None:
    """Return the peak of this process's GPU; None on a CPU, and for a card that is not known."""
    if AcceleratorState().device.type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    found = peak_flops_of(name)
    if found is None and says:
        logger.warning("ShardMonitorCallback: no mfu: the peak of %r is not known. Give peak_flops.", name)
    return found
