"""torch's fused Adam: where it is chosen, and what it does besides."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def prefer_fused(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Use the fused implementation of Adam where the user did not choose.

    Not that of SGD: it fails where a parameter gets its first gradient later than others. Nor that of Adagrad, which
    torch has for CPUs alone.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    if group["fused"] is not None or group["foreach"] or group["differentiable"]:
        return
    devices = {p.device.type for p in group["params"]}
    floating = all(p.is_floating_point() for p in group["params"])
    if floating and devices <= {"cpu", "cuda"}:
        group["fused"] = True
        group["foreach"] = False
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def divides_as_it_steps(optimizer: Optimizer | None, group: dict[str, Any]) -> bool:
    """Say whether an optimizer divides gradients as it reads them, if it is told by what: `grad_scale`."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and bool(group["fused"])


def divide_in_step(optimizer: Optimizer, divisor: torch.Tensor) -> bool:
    """Let the coming step divide the gradients that its groups show, or do it now; say whether the step will.

    Note [Late division] in gradient_notes.py.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    fused = all(divides_as_it_steps(optimizer, group) for group in groups)
    # torch's kernels take no other divisor; of 16 bits they step with more than a division of its own would leave.
    full = all(p.dtype == torch.float32 for group in groups for p in group["params"])
    if fused and full and divisor.dtype == torch.float32:
        scale = getattr(optimizer, "grad_scale", None)  # a loss scaler's
        whole = divisor if scale is None else divisor * scale.to(divisor.device)
        optimizer.grad_scale = whole  # type: ignore[attr-defined]
        return True
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
    return False
