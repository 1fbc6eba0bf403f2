"""The optimizer that a sharded `Accelerator` hands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ourshard.runtime import api


class ShardOptimizer(AcceleratedOptimizer):
    """An `AcceleratedOptimizer` that clips before each step where a DeepSpeed config (or the plugin) asks for it."""

    _largest_norm: float | None = None
    _trained: Callable[[], Iterable[torch.Tensor]]

    def step(self, closure: Any = None) -> None:
        """Update this rank's masters; whole parameters follow, on all ranks."""
        if self._largest_norm is not None and self.gradient_state.sync_gradients:
            unscale_once(self.scaler, self.optimizer)
            api.clip_grad_norm_(self._trained(), self._largest_norm)
        if self.scaler is not None:
            # A fused optimizer would be called on overflow too, and skip inside, so that accelerate saw no skipped step
            # and moved the schedule on. Costs one look at the overflow flag, as with optimizers that are not fused.
            self.optimizer._step_supports_amp_scaling = False
        super().step(closure)


def with_sharding(
    optimizer: AcceleratedOptimizer, largest_norm: float | None, trained: Callable[[], Iterable[torch.Tensor]]
) -> ShardOptimizer:
    """Make a prepared optimizer a `ShardOptimizer`, in place; `trained` gives the parameters that clipping looks at."""
    if type(optimizer) is AcceleratedOptimizer:
        optimizer.__class__ = ShardOptimizer
    assert isinstance(optimizer, ShardOptimizer), f"accelerate prepared a {type(optimizer).__name__}"
    optimizer._largest_norm = largest_norm
    optimizer._trained = trained
    return optimizer


def unscale_once(scaler: Any, optimizer: Optimizer) -> None:
    """Divide the gradients of `optimizer` by the loss scale, unless this step's are divided already."""
    if scaler is None:
        return
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
