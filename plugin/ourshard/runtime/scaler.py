"""Loss scaling for fp16 whose overflow all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from ourshard.runtime.engine import ENGINES
from ourshard.runtime.optim import bring_up_to_date


class ShardGradScaler(GradScaler):
    """A `GradScaler` for sharded gradients.

    An infinite gradient is seen only by the rank that holds its shard. `found_inf` is therefore the maximum over
    all ranks before any of them decides, so that all skip the step, and all halve the scale, or none does.
    """

    agrees = True  # optimizers of sharded parameters refuse one that does not

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        bring_up_to_date(optimizer)
        found = super()._unscale_grads_(optimizer, *args, **kwargs)
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
