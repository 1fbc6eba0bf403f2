"""Loss scaling for fp16 whose overflow all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from ourshard.runtime.coded_gradients import rescale_residuals
from ourshard.runtime.engine import ENGINES
from ourshard.runtime.in_backward import NO_SCALING
from ourshard.runtime.optim import bring_in_gradients, bring_up_to_date, engines_of, show_gradients


class ShardGradScaler(GradScaler):
    """A `GradScaler` for sharded gradients.

    An infinite gradient is seen only by the rank that holds its shard. `found_inf` is therefore the maximum over
    all ranks before any of them decides, so that all skip the step, and all halve the scale, or none does.
    What codecs lost of scaled gradients (`communication.error_feedback`) follows the scale.
    """

    agrees = True  # optimizers of sharded parameters refuse one that does not

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scaled: set[int] = set()  # engines whose losses this scales, by `order`

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        mine = [engine for engine in ENGINES if engine.order in self._scaled]
        keeping = [engine for engine in mine if engine.config.communication.error_feedback]
        before = self._scale.clone() if keeping and self._scale is not None else None
        super().update(new_scale)
        if before is not None and self._scale is not None:
            for engine in keeping:
                rescale_residuals(engine, self._scale / before)

    def _unscale_all(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale gradients on the host by themselves: torch would copy the scale there without waiting for it."""
        if inv_scale.device.type == "cpu":
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, *args)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        below = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.device.type == "cpu"]
        for parameter, _ in below:
            parameter.grad = None
        try:
            found = dict(super()._unscale_grads_(optimizer, inv_scale, found_inf, *args))
        finally:
            for parameter, gradient in below:
                parameter.grad = gradient
        if below:
            flag = found[torch.device("cpu")] = found_inf.cpu()
            factor = inv_scale.cpu()
            for _, gradient in below:
                torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, factor)
        return found

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        bring_up_to_date(optimizer)
        bring_in_gradients(optimizer)
        if any(engine.in_backward is not None for engine in engines_of(optimizer)):
            raise RuntimeError(NO_SCALING)
        show_gradients(optimizer)
        self._scaled |= {engine.order for engine in engines_of(optimizer)}
        found = self._unscale_all(optimizer, *args, **kwargs)
        engines = [engine for engine in ENGINES if engine.mesh.world.size > 1]
        if not engines:
            return found
        mesh = engines[0].mesh
        flag = torch.zeros((), device=mesh.device)
        for value in found.values():
            flag = torch.maximum(flag, value.to(mesh.device).reshape(()))
        engines[0].collectives.all_reduce(flag, mesh.world, "the overflow flag", dist.ReduceOp.MAX)
        if not found:  # no gradient here at all; torch wants one entry a device
            return {mesh.device: flag.reshape(1)}
        return {device: value.copy_(flag.to(device).reshape(value.shape)) for device, value in found.items()}
