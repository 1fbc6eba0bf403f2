"""Casts of what goes into a model and comes out of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with floating-point tensors in plain containers (and model outputs) cast to `dtype`.

    A list or dict without any is returned itself: a forward may add to the one it was given.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and not isinstance(value, nn.Parameter) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if type(value) in (list, tuple):
        items = [cast(item, dtype) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if isinstance(value, dict):
        if type(value) is dict:
            entries = {key: cast(item, dtype) for key, item in value.items()}
            return value if all(entries[key] is value[key] for key in value) else entries
        for key in list(value):
            if isinstance(value[key], (torch.Tensor, tuple, list, dict)):
                value[key] = cast(value[key], dtype)
    return value


def dtype_named(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None
