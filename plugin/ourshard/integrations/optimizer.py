"""The optimizer that a sharded `Accelerator` hands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ourshard.integrations.advising import advised
from ourshard.runtime import api
from ourshard.runtime.engine import ENGINES
from ourshard.runtime.optim import writing_masters
from ourshard.runtime.shown import own_of
from ourshard.runtime.wording import shorten


class ShardOptimizer(AcceleratedOptimizer):
    """An `AcceleratedOptimizer` that clips before each step where a DeepSpeed config (or the plugin) asks for it."""

    _largest_norm: float | None = None
    _trained: Callable[[], Iterable[torch.Tensor]]
    _looked_at = 0  # parameters that were there when strangers were last looked for

    def step(self, closure: Any = None) -> None:
        """Update this rank's masters; whole parameters follow, on all ranks.

        Raises:
            ValueError: the optimizer holds parameters that no prepared model owns.
        """
        count = sum(len(group["params"]) for group in self.param_groups)
        if count != self._looked_at:
            refuse_strangers(self.optimizer)
            self._looked_at = count
        if self._largest_norm is not None and self.gradient_state.sync_gradients:
            unscale_once(self.scaler, self.optimizer)
            api.clip_grad_norm_(self._trained(), self._largest_norm)
        if self.scaler is not None:
            # A fused optimizer would be called on overflow too, and skip inside, so that accelerate saw no skipped step
            # and moved the schedule on. Costs one look at the overflow flag, as with optimizers that are not fused.
            self.optimizer._step_supports_amp_scaling = False
        with advised():
            super().step(closure)

    def train(self) -> None:
        """Go into the mode to step in. Schedule-free optimizers have modes, and write weights anew between them."""
        self._switch(super().train, to_train=True)

    def eval(self) -> None:
        """Go into the mode to evaluate and save in. On all ranks, as `train`."""
        self._switch(super().eval, to_train=False)

    def _switch(self, switch: Callable[[], None], to_train: bool) -> None:
        if all(group.get("train_mode", to_train) == to_train for group in self.param_groups):
            switch()
            return
        with writing_masters(self.optimizer):
            switch()


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


def refuse_fused_backward(optimizer: Optimizer) -> None:
    """Raise `ValueError` for LOMO and its like."""
    if callable(getattr(optimizer, "fused_backward", None)):
        raise ValueError(
            f"The optimizer {type(optimizer).__name__} changes each parameter while backward runs, by this rank's "
            "gradient, before ranks have added theirs. Use another one; Adafactor has a small state too, and with "
            "optimizer_in_backward: true gradients are let go as AdamW, SGD and others step them."
        )


def unscale_once(scaler: Any, optimizer: Optimizer) -> None:
    """Divide the gradients of `optimizer` by the loss scale, unless this step's are divided already."""
    if scaler is None:
        return
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)


def refuse_strangers(optimizer: Optimizer) -> None:
    """Raise `ValueError` if an optimizer steps parameters of no sharded model: each rank would train its own.

    Looked for at the first step and not in `prepare`, because models may be prepared after their optimizer.
    """
    strange = _strangers(optimizer) if dist.is_initialized() and dist.get_world_size() > 1 else ""
    if strange:
        raise ValueError(
            f"The {type(optimizer).__name__} steps parameters of no model that was prepared: {strange}. Their "
            "gradients stay on each rank, which would train them apart. Prepare the module that owns them; or "
            "freeze it before the optimizer is made (`requires_grad_(False)`), if it is not to be trained."
        )


def refuse_to_save_strangers(optimizers: Iterable[Optimizer]) -> None:
    """Raise `ValueError` if an optimizer steps parameters of no sharded model, as one rank alone may.

    A checkpoint holds state by the names of the models that were prepared.
    """
    for optimizer in optimizers:
        strange = _strangers(optimizer)
        if strange:
            raise ValueError(
                f"save_state: the {type(optimizer).__name__} steps parameters of no model that was prepared: "
                f"{strange}. Their state has no names to be saved by. Prepare the module that owns them."
            )


def _strangers(optimizer: Optimizer) -> str:
    """Name parameters of an optimizer that are of no sharded model; "" if there are none."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    engines = [engine for engine in ENGINES if not several or engine.mesh.world.size > 1]
    models = [engine.model() for engine in engines]
    known = {id(own_of(parameter)) for model in models if model is not None for parameter in model.parameters()}
    known |= {id(run.parameter) for engine in engines for lane in engine.lanes() for run in lane.runs}
    strange = [
        f"{tuple(parameter.shape)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(own_of(parameter)) not in known
    ]
    return shorten(strange, 5)
