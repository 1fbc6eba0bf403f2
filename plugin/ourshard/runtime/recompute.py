"""Activation checkpointing of the units: `activation_checkpointing: true`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ourshard.runtime.inputs import Inputs
from ourshard.runtime.module_buffers import version_of


def recompute_in_backward(model: nn.Module, modules: list[nn.Module], inputs: Inputs | None) -> None:
    """Keep only the inputs of each unit in forward, on the host where `inputs` says so, and compute it again later.

    A Transformers model does it itself, since it knows what else must change (no cache of keys and values), also where
    it is a part of `model`. Others of the `modules` (those of the units) are wrapped. Raises `ValueError` where there
    is nothing to do it for.
    """
    own = _outermost(model, set(modules))
    inside = {module for each in own for module in each.modules()}
    rest = [module for module in modules if module not in inside]
    if not own and not rest:
        raise ValueError("activation_checkpointing: the model has no units but the root; say in `wrap` what they are.")
    for each in own:
        name = "activation" if hasattr(each, "activation_checkpointing_enable") else "gradient"  # its older name
        enable: Any = getattr(each, f"{name}_checkpointing_enable")
        enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
    if inputs is not None and own:
        inputs.follow(own)
    call = checkpoint if inputs is None else partial(inputs.around, checkpoint)
    for module in rest:
        module.forward = partial(_recomputed, call, module.forward, _Buffers(module))  # type: ignore[method-assign]


def _outermost(module: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """Return the models inside of `module`, or itself, that have checkpoints of their own, and are in no unit."""
    if module in units:
        return []
    if recomputes_itself(module):
        return [module]
    found = (each for child in module.children() for each in _outermost(child, units))
    return list(dict.fromkeys(found))


def recomputes_itself(model: nn.Module) -> bool:
    """Say whether a model has checkpoints of its own, as those of Transformers have."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


class _Buffers:
    """The persistent buffers of a unit, by owner and name, and which of them its forwards read and change.

    Those of norms change, too, but what a norm computes in training does not depend on them.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self.places = [
            (module, name)
            for module in unit.modules()
            for name, value in module._buffers.items()
            if value is not None and name not in module._non_persistent_buffers_set
        ]
        self._kept: list[bool] | None = None  # whose values are; None before the first forward in training

    def look(self) -> list[_Seen]:
        """Return the buffers before a forward, with the values of those that it may read and change."""
        kept = self._kept or [not isinstance(module, _NormBase) for module, _ in self.places]
        return [_Seen.of(*place, keep) for place, keep in zip(self.places, kept, strict=True)]

    def changed(self, before: list[_Seen]) -> list[_Seen]:
        """Return those that a forward has changed. From the first one on, only values of such buffers are kept.

        A buffer that begins to change later is read as that forward left it when it runs again, and then as it was.
        """
        found = [seen.has_changed() for seen in before]
        if self._unit.training:
            known = self._kept or [False] * len(found)
            of_norms = [isinstance(seen.module, _NormBase) for seen in before]
            each = zip(known, found, of_norms, strict=True)
            self._kept = [kept or (changed and not of_norm) for kept, changed, of_norm in each]
        return [seen for seen, changed in zip(before, found, strict=True) if changed]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A buffer before a forward."""

    module: nn.Module
    name: str
    buffer: torch.Tensor | None
    version: int
    values: torch.Tensor | None  # where they are kept

    @classmethod
    def of(cls, module: nn.Module, name: str, keep: bool) -> _Seen:
        value = module._buffers.get(name)
        version = 0 if value is None else version_of(value)
        return cls(module, name, value, version, value.detach().clone() if keep and value is not None else None)

    def has_changed(self) -> bool:
        """Say whether the buffer was replaced, written to, or is of a norm, whose kernels write unseen."""
        value = self.module._buffers.get(self.name)
        written = value is not None and version_of(value) != self.version
        return value is not self.buffer or written or isinstance(self.module, _NormBase)

    def bring_back(self) -> None:
        """Make the buffer what it was; one that was replaced is the one of before."""
        if self.values is None or self.buffer is None:
            return
        self.module._buffers[self.name] = self.buffer
        self.buffer.data.copy_(self.values)


def _recomputed(call: Any, forward: Any, buffers: _Buffers, /, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` of a unit that has these persistent buffers through `call`, a checkpoint."""
    if torch.is_grad_enabled():
        _refuse_caches(forward, (*args, *kwargs.values()))
        forward = _UpdatesOnce(forward, buffers) if buffers.places else forward
    return checkpointed(call, forward, *args, **kwargs)


def is_cache(value: Any) -> bool:
    """Say whether `value` is a cache of keys and values of Transformers, by its methods."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _refuse_caches(forward: Any, values: tuple[Any, ...]) -> None:
    """Refuse a cache of keys and values, which would be filled twice."""
    for value in values:
        if is_cache(value):
            name = type(getattr(forward, "__self__", forward)).__name__
            raise ValueError(
                f"activation_checkpointing: {name} is given a {type(value).__name__} in training, and would add to it "
                "again when backward recomputes it. Call the model with use_cache=False, or set that in its config."
            )


class _UpdatesOnce:
    """A forward that changes buffers, as the statistics of batch norms, when it runs first, and not when again.

    It runs again with the buffers as they were: a spectral norm or a codebook computes with those that it updates.
    """

    __slots__ = ("_buffers", "_changed", "_forward")

    def __init__(self, forward: Any, buffers: _Buffers) -> None:
        self._forward, self._buffers = forward, buffers
        self._changed: list[_Seen] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._changed is None:
            before = self._buffers.look()
            result = self._forward(*args, **kwargs)
            self._changed = self._buffers.changed(before)
            return result
        now = [_Seen.of(seen.module, seen.name, keep=True) for seen in self._changed]
        for seen in self._changed:
            seen.bring_back()
        try:
            return self._forward(*args, **kwargs)
        finally:
            for seen in now:
                seen.bring_back()  # by `data`: the graph may have saved it, and there is no new version


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
