"""What captured steps rest on, and what a step leaves on the host: Note [Captured steps] in graph_policy.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane


def rests_on(engine: Engine, modules: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """Return what must be the same for a replay, besides the inputs; compared in every step."""
    with torch._C.DisableTorchFunctionSubclass():
        return (
            [module.training for module in modules.values()],
            [id(buffer) for module in modules.values() for buffer in module._buffers.values()],
            [parameter.requires_grad for lane in engine.lanes() for parameter in lane.resting],
            [(lane.master.data_ptr(), lane.compute_dtype, lane.direct) for lane in engine.lanes()],
        )


def why_not_now(engine: Engine) -> str:
    """Return why a forward must run eagerly, whatever its inputs; empty if it need not."""
    reasons = {
        "its gradients wait for a later sync (no_sync, gradient accumulation)": not engine.require_sync,
        "ranks may run out of batches (Join)": engine.schedule.joins,
        "autograd's anomaly detection is on": torch.is_anomaly_enabled(),
        "parameters were written since the last forward": engine.writes > 0,
        "not all ranks use the same parameters": not engine.used_alike,
    }
    found = next((why for why, holds in reasons.items() if holds), "")
    if not found and not is_fresh(engine):
        return "gradients of an earlier backward are still there (gradient accumulation, or zeros in place of None)"
    return found


def hooked(engine: Engine, modules: Mapping[str, nn.Module]) -> str:
    """Name a hook that Python would have to run inside of the graph; the root's own run outside."""
    for name, module in modules.items():
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        if name and any(number not in engine.own_hooks for found in hooks for number in found):
            return f"{name} has a hook"
    for lane in engine.lanes():
        for position, leaf in enumerate(lane.leaves):
            after = leaf._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
            if leaf._backward_hooks or any(number not in engine.own_hooks for number in after):
                return f"{lane.name_of(position)} has a hook"
    return ""


def bring_in_anew(engine: Engine) -> None:
    """Wait, on the current stream, for gathers under way, and let the next forward bring in all that stays whole."""
    for unit in engine.units:
        unit.finish_gather()
        if any(not lane.direct for lane in unit.lanes):
            unit.mark_stale()


def is_fresh(engine: Engine) -> bool:
    """Say whether no gradient is there that the next backward would add to."""
    for lane in engine.lanes():
        if lane.trainable:
            lane.forget_released()
            if lane.accumulated or (lane.arriving is not None and not lane.direct) or lane.has_leaf_gradients():
                return False
    return True


class AfterForward:
    """What a forward leaves on the host: which units that stay whole show the masters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._units = [unit for unit in engine.units if unit.whole and not unit.sharded]
        self._lanes = [lane for unit in self._units for lane in unit.lanes]

    def restore(self) -> None:
        for unit in self._units:
            unit.whole = True
        for lane in self._lanes:
            lane.stale = False
        self._engine.sync_backward = True


class AfterBackward:
    """What a backward leaves: which gradients exist, and where."""

    def __init__(self, engine: Engine) -> None:
        self._lanes = [_Gradients(lane) for lane in engine.lanes() if lane.trainable]

    def restore(self) -> None:
        for gradients in self._lanes:
            gradients.restore()


class _Gradients:
    """The gradients of one lane; their memory is the graph's, and stays when `zero_grad` lets go of them."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._gradient = None if lane.direct else lane.gradient
        self._touched, self._valid = list(lane.touched), list(lane.valid)

    def restore(self) -> None:
        lane = self._lane
        lane.touched[:] = self._touched
        if lane.direct:
            lane.show_direct()
        elif self._gradient is not None:
            lane.take_gradient(self._gradient)
        lane.settle(list(self._valid))
