"""Activation checkpointing of the units: `activation_checkpointing: true`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ourshard.runtime.inputs import Inputs


def recompute_in_backward(model: nn.Module, modules: list[nn.Module], inputs: Inputs | None) -> None:
    """Keep only the inputs of each unit in forward, on the host where `inputs` says so, and compute it again later.

    A Transformers model does it itself, since it knows what else must change (no cache of keys and values). Of other
    models the `modules` (those of the units) are wrapped. Raises `ValueError` where there is nothing to do it for.
    """
    if recomputes_itself(model):
        name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # its older name
        enable: Any = getattr(model, f"{name}_checkpointing_enable")
        enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        if inputs is not None:
            inputs.follow(model)
        return
    if not modules:
        raise ValueError("activation_checkpointing: the model has no units but the root; say in `wrap` what they are.")
    call = checkpoint if inputs is None else partial(inputs.around, checkpoint)
    for module in modules:
        module.forward = partial(checkpointed, call, module.forward)  # type: ignore[method-assign]


def recomputes_itself(model: nn.Module) -> bool:
    """Say whether a model has checkpoints of its own, as those of Transformers have."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


class _Place:
    """Stands in arguments for a tensor that was taken out of them."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def checkpointed(call: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` through `call`, a checkpoint, to which all tensors are given by position, also those in keywords.

    For these alone it saves what random numbers the device is at, and lets autograd keep them.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    places = _take_out(args, tensors)
    named = {name: _take_out(value, tensors) for name, value in kwargs.items()}
    return call(partial(_put_back, forward, places, named), *tensors, use_reentrant=False)


def _put_back(forward: Any, places: Any, named: dict[str, Any], *tensors: torch.Tensor) -> Any:
    return forward(*_fill(places, tensors), **{name: _fill(value, tensors) for name, value in named.items()})


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` with places for its tensors, which are added to `tensors`; lists and dicts stay the same objects.

    A forward may add to a list or a dict that it was given. A tensor that is given twice is one again later: attention
    asks whether its queries are its keys.
    """
    if isinstance(value, torch.Tensor):
        index = next((index for index, known in enumerate(tensors) if known is value), len(tensors))
        if index == len(tensors):
            tensors.append(value)
        return _Place(index)
    if type(value) is tuple:
        return tuple(_take_out(item, tensors) for item in value)
    return value


def _fill(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if type(value) is tuple:
        return tuple(_fill(item, tensors) for item in value)
    return value
