"""Activation checkpointing of the units: `activation_checkpointing: true`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(model: nn.Module, modules: list[nn.Module]) -> None:
    """Keep only the inputs of each unit in forward, and compute the unit again in backward.

    A Transformers model does it itself, since it knows what else must change (no cache of keys and values). Of other
    models the `modules` (those of the units) are wrapped. Raises `ValueError` where there is nothing to do it for.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # its older name
        enable: Any = getattr(model, f"{name}_checkpointing_enable")
        enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        return
    if not modules:
        raise ValueError("activation_checkpointing: the model has no units but the root; say in `wrap` what they are.")
    for module in modules:
        module.forward = partial(_checkpointed, module.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
