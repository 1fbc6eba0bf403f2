"""Random initialisation of a model that no rank holds.

Inside of `init_context`, factory functions make lazy tensors (`lazy.py`), so that a model's constructor takes the
memory of one parameter at a time. Random numbers move on as they would have: with the same seed, each parameter gets
the values that it gets without the context. They are drawn again, by each rank for its rows, in `shard_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode

from ourshard.runtime.lazy import lazy, materialize
from ourshard.runtime.source import Constant

LEAST = 1000  # elements; smaller tensors are made as always

_CONSTANT = {torch.empty: 0, torch.zeros: 0, torch.ones: 1}
_RANDOM = {torch.randn: torch.Tensor.normal_, torch.rand: torch.Tensor.uniform_}
_UNDERSTOOD = {"size", "dtype", "device", "requires_grad", "layout", "pin_memory", "memory_format"}


class _LazyFactories(TorchFunctionMode):
    """Answer factory functions with lazy tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        shape = _lazy_shape(func, args, kwargs)
        if shape is None:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        made = lazy(Constant(_CONSTANT.get(func, 0), shape, dtype))
        if func in _RANDOM:
            _RANDOM[func](made)
        return made


def _lazy_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that a factory function is asked for, or None if its result should be made as always."""
    if func not in _CONSTANT and func not in _RANDOM:
        return None
    device = torch.device(kwargs.get("device") or torch.get_default_device())
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):  # a type of Python, as `bool`
        return None
    if device.type != "cpu" or not dtype.is_floating_point or kwargs.get("requires_grad"):
        return None
    if any(value is not None for key, value in kwargs.items() if key not in _UNDERSTOOD):
        return None
    given = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    if not isinstance(given, (tuple, list)) or not all(isinstance(extent, int) for extent in given):
        return None  # extents that are tensors
    return tuple(given) if math.prod(given) >= LEAST else None


@contextmanager
def init_context() -> Iterator[None]:
    """Build a model without the memory for it: `with init_context(): model = AutoModelForCausalLM.from_config(...)`.

    Every rank does the same, with the same seed. On CPUs; a constructor that asks for another device gets it as
    always. Buffers are made as always, too.
    """
    hook = register_module_buffer_registration_hook(_make_buffer)  # type: ignore[arg-type]
    try:
        with _LazyFactories():
            yield
    finally:
        hook.remove()


def _make_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else materialize(buffer)
