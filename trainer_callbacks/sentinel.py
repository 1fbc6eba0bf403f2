"""`ShardSentinelCallback`: say at once, on all ranks, what went wrong in training, with parameter, unit and rank."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from enum import Enum
from typing import Any

import torch
from ourshard.checkpoint.foreign.names import shorten
from ourshard.runtime.api import engine_of
from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from torch import nn
from transformers import TrainerCallback

logger = logging.getLogger("ourshard")


class Action(Enum):
    """What the sentinel does about what it found."""

    WARN = "warn"  # rank 0 logs it
    STOP = "stop"  # and training ends after the step
    RAISE = "raise"  # RuntimeError on every rank; for gradients before the optimizer steps


class ShardSentinelCallback(TrainerCallback):
    """Looks for gradients and losses that are not finite, losses that jump, and copies that differ between ranks.

    Every `every` optimizer steps the ranks compare notes over the host: a few bytes each. Training is not changed.

    Args:
        every: optimizer steps between two looks at gradients and copies.
        spike: a logged loss above this multiple of the median of the last `window` logged ones is one.
        window: logged losses that are remembered, and the fewest before a spike is looked for is a fifth of it.
        action: for gradients and losses that are not finite and for copies that differ; a jump is a warning.

    Without ourshard it looks at this process's gradients and losses alone.
    """

    def __init__(
        self, every: int = 10, spike: float = 3.0, window: int = 50, action: Action | str = Action.WARN
    ) -> None:
        if every < 1 or window < 5 or spike <= 1.0:
            raise ValueError(
                f"ShardSentinelCallback(every={every}, spike={spike}, window={window}): every is 1 or more, spike more "
                "than 1, window 5 or more."
            )
        self.every, self.spike, self.action = every, spike, Action(action)
        self._losses: deque[float] = deque(maxlen=window)

    # ---- events --------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at the gradients that are about to be stepped."""
        if (state.global_step + 1) % self.every == 0:
            self._act(self._bad_gradients(model, state.global_step + 1), control, state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare what several ranks hold alike."""
        engine = engine_of(model)
        if engine is not None and state.global_step % self.every == 0:
            self._act(_differing_copies(engine, state.global_step), control, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Look at the logged loss, which is the same on every rank."""
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            self._act(f"step {state.global_step}: the loss is {loss}.", control, state)
            return
        enough = len(self._losses) >= (self._losses.maxlen or 0) // 5
        usual = statistics.median(self._losses) if enough else math.inf
        if loss > self.spike * usual:
            self._warn(f"step {state.global_step}: the loss jumped to {loss:.4g}; the median was {usual:.4g}.", state)
        self._losses.append(loss)

    # ---- findings ------------------------------------------------------------------------------------------

    def _bad_gradients(self, model: nn.Module, step: int) -> str | None:
        engine = engine_of(model)
        if engine is None:
            names = [n for n, p in model.named_parameters() if p.grad is not None and not _finite([p.grad])]
            return f"step {step}: gradients are not finite: {shorten(names)}." if names else None
        lanes = [lane for lane in engine.lanes() if lane.trainable]
        clean = _finite([gradient for lane in lanes for gradient in _gradients(lane).values()])
        if not engine.control.any_of([not clean], "sentinel: gradients")[0]:
            return None
        mine = [] if clean else [where for lane in lanes for where in _bad_in(lane)]
        told = enumerate(engine.control.gather_objects(mine, "sentinel: which gradients"))
        found = [f"rank {rank} holds {shorten(names)}" for rank, names in told if isinstance(names, list) and names]
        return f"step {step}: gradients are not finite: {'; '.join(found)}."

    # ---- actions -------------------------------------------------------------------------------------------

    def _act(self, found: str | None, control: Any, state: Any) -> None:
        if found is None:
            return
        if self.action is Action.RAISE:
            raise RuntimeError(f"ShardSentinelCallback: {found}")
        self._warn(found, state)
        if self.action is Action.STOP:
            control.should_training_stop = True

    def _warn(self, found: str | None, state: Any) -> None:
        if found is not None and state.is_world_process_zero:
            logger.warning("sentinel: %s", found)


def _gradients(lane: Lane) -> dict[int, torch.Tensor]:
    """Return this rank's part of the gradients of a lane, by position in it."""
    if lane.placement.whole:
        found = {position: tensor.grad for position, tensor in enumerate(lane.resting)}
        return {position: gradient for position, gradient in found.items() if gradient is not None}
    if lane.gradient is None or not lane.accumulated:
        return {}
    positions = [position for position, valid in enumerate(lane.valid) if valid and lane.rows(position).rows]
    return {position: lane.rows_view(lane.gradient, position) for position in positions}


def _bad_in(lane: Lane) -> list[str]:
    bad = [position for position, gradient in _gradients(lane).items() if not _finite([gradient])]
    return [f"{lane.name_of(position)} (unit {lane.unit.label})" for position in bad]


def _finite(tensors: list[torch.Tensor]) -> bool:
    """Say whether all elements are finite; the host waits once."""
    if not tensors:
        return True
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all())


def _differing_copies(engine: Engine, step: int) -> str | None:
    """Compare what several ranks hold alike: parameters that are whole, and shards with their replicas."""
    mesh = engine.mesh
    mine: dict[str, tuple[int, int]] = {}  # unit and lane -> (which copies it is one of, checksum)
    for number, lane in enumerate(engine.lanes()):
        if lane.placement.whole or mesh.replicate.size > 1:
            values = lane.resting if lane.placement.whole else [lane.master]
            part = -1 if lane.placement.whole else mesh.shard.rank
            mine[f"unit {lane.unit.label}, lane {number}"] = part, sum(_checksum(each) for each in values)
    if not mine:
        return None
    told = engine.control.gather_objects(mine, "sentinel: copies")
    found = []
    for name in mine:
        values = [table[name] for table in told if isinstance(table, dict)]
        for part in sorted({part for part, _ in values}):
            counts = Counter(checksum for own, checksum in values if own == part)
            usual = counts.most_common(1)[0][0]
            odd = [rank for rank, (own, checksum) in enumerate(values) if own == part and checksum != usual]
            if odd:
                found.append(f"{name}: ranks {odd} differ from the others")
    return f"step {step}: copies that should be equal are not: {'; '.join(found)}." if found else None


def _checksum(values: torch.Tensor) -> int:
    """Return the sum of the bits, as integers of the elements' width."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.detach().contiguous().view(-1).view(width).sum(dtype=torch.int64).item())
