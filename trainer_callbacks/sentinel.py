"""`ShardSentinelCallback`: say at once, on all ranks, what went wrong in training, with parameter, unit and rank."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from enum import Enum
from typing import Any

import torch
from ourshard.runtime.api import engine_of
from ourshard.runtime.clip import register_clip_pre_hook
from ourshard.runtime.engine import Engine
from ourshard.runtime.wording import shorten
from ourshard.trainer_callbacks import sentinel_gradients
from ourshard.trainer_callbacks.sentinel_stragglers import STEPS, StragglerWatch
from ourshard.values import is_number
from torch import nn
from transformers import TrainerCallback

logger = logging.getLogger("ourshard")


class Action(Enum):
    """What the sentinel does about what it found."""

    WARN = "warn"  # rank 0 logs it
    STOP = "stop"  # and training ends after the step
    RAISE = "raise"  # RuntimeError on every rank; for gradients before the optimizer steps, unless backward does


class ShardSentinelCallback(TrainerCallback):
    """Looks for gradients and losses that are not finite, losses that jump, copies that differ, and slow ranks.

    Every `every` optimizer steps the ranks compare notes over the host: a few bytes each. Training is not changed.

    Args:
        every: optimizer steps between two looks at gradients and copies. Gradients under a loss scaler (fp16) are not
            looked at: that they overflow is what it is for.
        spike: a logged loss above this multiple of the median of the last `window` logged ones is one.
        window: logged losses that are remembered, and the fewest before a spike is looked for is a fifth of it.
        action: for gradients and losses that are not finite and for copies that differ; the rest are warnings.
        straggler: a rank that computes more than this multiple of the others' median is one.
        straggler_every: optimizer steps between two such comparisons; the last `STEPS` (5) before each are measured.

    Without ourshard it looks at this process's gradients and losses alone.
    """

    def __init__(
        self,
        every: int = 10,
        spike: float = 3.0,
        window: int = 50,
        action: Action | str = Action.WARN,
        *,
        straggler: float = 1.5,
        straggler_every: int = 100,
    ) -> None:
        whole = all(is_number(count, whole=True) for count in (every, window, straggler_every))
        numbers = whole and is_number(spike) and is_number(straggler)
        if not numbers or every < 1 or window < 5 or spike <= 1.0 or straggler <= 1.0 or straggler_every < 1:
            raise ValueError(
                f"ShardSentinelCallback(every={every!r}, spike={spike!r}, window={window!r}, straggler={straggler!r}, "
                f"straggler_every={straggler_every!r}): every and straggler_every are whole and 1 or more, window is "
                "whole and 5 or more, spike and straggler are more than 1."
            )
        known = [each.value for each in Action]
        if not isinstance(action, Action) and action not in known:
            raise ValueError(f"ShardSentinelCallback: action is {action!r}; use one of {', '.join(known)}.")
        self.every, self.spike, self.action = every, spike, Action(action)
        self.straggler, self.straggler_every = straggler, straggler_every
        self._losses: deque[float] = deque(maxlen=window)
        self._engine: Engine | None = None
        self._step = 0  # the number of the step that runs
        self._gradients: sentinel_gradients.GradientWatch | None = None  # in a step that is looked at
        self._stragglers: StragglerWatch | None = None
        self._measured_from = 0  # the first step of its time
        self._found: str | None = None  # about gradients, and not yet acted on
        self._hook: Any = None
        self._scaled = False  # a loss scaler is at work
        self._told = -1  # the last step whose gradients were said to be wrong

    # ---- events --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Ask to be called before gradients are clipped."""
        self._end()  # of a training that raised
        self._engine = engine_of(model)
        if self._engine is not None:
            self._hook = register_clip_pre_hook(self._look)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Begin to watch, if the ranks are to compare at this step's end."""
        self._step = state.global_step + 1
        self._scaled = getattr(optimizer, "scaler", None) is not None
        if self._engine is None:
            return
        if self._step % self.every == 0 and not self._scaled:
            self._gradients = sentinel_gradients.GradientWatch(self._engine)
        if -self._step % self.straggler_every < STEPS and self._stragglers is None:
            self._stragglers = StragglerWatch(self._engine)
            self._measured_from = self._step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Act on what was seen before clipping, or look now."""
        if self._engine is not None:
            self._look()
            found, self._found = self._found, None
        else:
            looks = (state.global_step + 1) % self.every == 0
            found = _bad_here(model, state.global_step + 1) if looks else None
        self._told = self._told if found is None else state.global_step + 1
        self._act(found, control, state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare what several ranks hold alike, and how long they compute."""
        if self._engine is None:
            return
        if state.global_step % self.every == 0:
            self._act(_differing_copies(self._engine, state.global_step), control, state)
        if state.global_step % self.straggler_every == 0 and self._stragglers is not None:
            watch, self._stragglers = self._stragglers, None
            slow = watch.find(state.global_step - self._measured_from + 1, self.straggler)
            watch.end()
            if slow is not None:
                self._warn(f"step {state.global_step}: {slow}", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch no longer."""
        self._end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Look at the logged loss and norm of gradients, which are the same on every rank.

        With its default `logging_nan_inf_filter` the Trainer logs another loss where it is not finite.
        """
        loss, norm = (logs or {}).get("loss"), (logs or {}).get("grad_norm")
        if norm is not None and not math.isfinite(norm) and not self._scaled:
            if state.global_step != self._told:
                self._act(f"step {state.global_step}: the norm of all gradients is {norm}.", control, state)
            return
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

    # ---- gradients -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Run before gradients are clipped, which makes all of them NaN where one is. Collective, on its step."""
        if self._gradients is None or self._engine is None:
            return
        watch, self._gradients = self._gradients, None
        watch.end()
        found = sentinel_gradients.find(self._engine, watch)
        if found is not None:
            self._found = f"step {self._step}: {found}"
        if self._found is not None and self.action is Action.RAISE:
            raise RuntimeError(f"ShardSentinelCallback: {self._found}")

    def _end(self) -> None:
        """Let go of everything that watches."""
        if self._gradients is not None:
            self._gradients.end()
        if self._stragglers is not None:
            self._stragglers.end()
        if self._hook is not None:
            self._hook.remove()
        self._gradients = self._stragglers = self._hook = self._found = None

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


def _bad_here(model: nn.Module, step: int) -> str | None:
    """Look at the gradients of a model that is not sharded."""
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    names = [name for name, gradient in named if gradient is not None and not sentinel_gradients.finite([gradient])]
    return f"step {step}: gradients are not finite: {shorten(names)}." if names else None


def _differing_copies(engine: Engine, step: int) -> str | None:
    """Compare what several ranks hold alike: parameters that are whole, and shards with their replicas."""
    mesh = engine.mesh
    mine: dict[str, tuple[int, int]] = {}  # unit and lane -> (which copies it is one of, checksum)
    for number, lane in enumerate(engine.lanes()):
        if lane.placement.whole or (mesh.replicate.size > 1 and not lane.divided):
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
