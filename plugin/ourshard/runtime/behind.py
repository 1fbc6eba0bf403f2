"""Steps on the host that go on while the next forward begins.

Note [Overlapped steps]
-----------------------
With `offload.overlap_step` the end of `optimizer.step()` does not wait for the lanes on the host: one thread steps them
in the order of forward (Note [Steps by lane] in lane_step.py). A lane is waited for where it is used next: before its
master goes up, before a gradient comes down to it, and before anyone reads or writes its master (`LaneStore.master`),
its gradient or, through `state_dict`, its states. So a forward computes with the units that are done, and every number
is the one that it would have without.

Each lane is stepped by a twin of the optimizer: of the same class, with the groups as they are when `step` is called,
so that a scheduler may change them at once, and with stand-ins for the parameters, so that `zero_grad` may drop
gradients. The states are the user's own.

A hook after the step is to see its end; where an optimizer has one, nothing overlaps.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from ourshard.runtime.fused import divide_in_step
from ourshard.runtime.handle import GET_GRAD
from ourshard.runtime.states import keep_on_host

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane

logger = logging.getLogger("ourshard")


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ourshard-step")  # a step has all threads of torch to itself


class Stepping:
    """The step of one lane that is under way: Note [Overlapped steps]."""

    __slots__ = ("_future", "_lane", "_optimizer")

    def __init__(self, optimizer: Optimizer, lane: Lane) -> None:
        self._optimizer = optimizer
        self._lane = lane
        self._future: Future[None] = _thread().submit(_step, _twin(optimizer, lane), lane.take_divisor())

    @torch.inference_mode(False)  # in which who evaluates waits: it would make states that no step may change
    @torch.no_grad()
    def wait(self) -> None:
        """Return when the lane is stepped; raises what the step raised."""
        self._future.result()
        keep_on_host(self._optimizer, self._lane)


def can_overlap(optimizer: Optimizer, lanes: Sequence[Lane]) -> bool:
    """Say whether the config asks for it, and nobody looks at the end of the step. Before hooks of ours are there."""
    if not all(lane.unit.engine.config.offload.overlap_step for lane in lanes):
        return False
    strangers = [hook for hook in _global_optimizer_post_hooks.values() if not is_ours(hook)]
    if strangers or optimizer._optimizer_step_post_hooks:
        _say_hooked(type(optimizer).__name__)
        return False
    return True


def is_ours(hook: Any) -> bool:
    """Say whether a hook is of this package (the runtime's, that of background saves): none looks at parameters."""
    return str(getattr(hook, "__module__", "")).startswith("ourshard.")


@cache
def _say_hooked(name: str) -> None:
    logger.warning(
        "offload.overlap_step: a hook is registered to run after the step of %s, and would run before it is over; "
        "steps are not overlapped while it is there.",
        name,
    )


def _twin(optimizer: Optimizer, lane: Lane) -> Optimizer:
    """Return an optimizer that steps `lane` alone, as `optimizer` would now: Note [Overlapped steps]."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state, twin.param_groups = defaultdict(dict), []
    mine = {id(run.parameter) for run in lane.runs}
    for group in optimizer.param_groups:
        kept: list[nn.Parameter] = []
        for parameter in group["params"]:
            gradient = GET_GRAD(parameter) if id(parameter) in mine else None
            if gradient is not None:
                stand_in = nn.Parameter(parameter.data)
                stand_in.grad = gradient
                twin.state[stand_in] = optimizer.state[parameter]
                kept.append(stand_in)
        twin.param_groups.append({**{key: _as_it_is(value) for key, value in group.items()}, "params": kept})
    return twin


def _as_it_is(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _step(twin: Optimizer, divisor: torch.Tensor | None) -> None:
    _run(twin, divisor)


def _run(twin: Optimizer, divisor: torch.Tensor | None) -> None:
    if divisor is not None:
        divide_in_step(twin, divisor)
    type(twin).step.__wrapped__(twin)  # type: ignore[attr-defined]  # without hooks
