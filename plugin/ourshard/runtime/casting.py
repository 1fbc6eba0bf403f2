"""Casts of what goes into a model and comes out of it.

Note [Where inputs are cast]
----------------------------
Where no autocast casts for single operations, floating-point inputs are cast to `precision.param_dtype` where a call
comes from outside: at the root, or at a module that is called on its own, in `gathered` too. Between the modules of a
forward nothing is cast: a residual that a model keeps in float32 stays so. With `precision.cast_inputs: false` nothing
is cast: a model that wants its inputs in another dtype (positions, timesteps) casts where it meets weights.

Where autocast does it, Accelerate puts it around the root's forward. A module that is called on its own (the encoder in
`generate`, a head that reads hidden states) is outside of that, and its large weights are of 16 bits while its small
ones are not: it computes under the same autocast.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ourshard.config import PrecisionConfig
from ourshard.runtime.handle import Resting

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine


_AUTOCASTS = (torch.bfloat16, torch.float16)


class Casts:
    """The dtypes of what goes into a model and comes out of it; None where it is left as it is."""

    __slots__ = ("alone", "autocast", "autocast_to", "inputs_to", "outputs_to")

    def __init__(self, precision: PrecisionConfig, autocast: bool) -> None:
        self.autocast = autocast
        computes_in = dtype_named(precision.param_dtype)
        self.inputs_to = None if autocast or not precision.cast_inputs else computes_in
        self.autocast_to = computes_in if autocast and computes_in in _AUTOCASTS else None
        self.alone = self.inputs_to is not None or self.autocast_to is not None  # a module on its own is to be asked
        self.outputs_to = dtype_named(precision.output_dtype)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call from outside as they are to be, or None for as they are."""
        if self.inputs_to is None:
            return None
        return cast(args, self.inputs_to), cast(kwargs, self.inputs_to)

    def outputs(self, outputs: Any) -> Any:
        """Return the root's outputs as they are to be, or None for as they are."""
        return None if self.outputs_to is None else cast(outputs, self.outputs_to)


class CastsAlone:
    """The casts of a module where it is called on its own: Note [Where inputs are cast].

    A checkpoint around it runs that call again in backward, with the inputs as they were: they are cast again.
    """

    __slots__ = ("_alone", "_engine", "_entered", "_leaves")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alone = False  # the last call in no backward was
        self._entered: list[torch.autocast] = []
        self._leaves = False  # the module has the hook that leaves them

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call of the module as they are to be, or None for as they are."""
        engine = self._engine
        if not engine.phase_is_backward:
            self._alone = engine.forward_depth == 0
        if not self._alone:
            return None
        if engine.casts.autocast_to is not None:
            self._enter(module, engine.mesh.device.type, engine.casts.autocast_to)
        return engine.casts.inputs(args, kwargs)

    def _enter(self, module: nn.Module, device: str, dtype: torch.dtype) -> None:
        if not self._leaves:  # few modules are ever called so: the others do without the hook
            self._leaves = True
            leave = torch._dynamo.disable(self._leave)
            self._engine.own_hooks.add(module.register_forward_hook(leave, always_call=True).id)
        entered = torch.autocast(device, dtype)
        entered.__enter__()
        self._entered.append(entered)

    def _leave(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with floating-point tensors in plain containers, dataclasses and model outputs cast to `dtype`.

    A list, dict or dataclass without any is returned itself: a forward may add to the one it was given.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and not isinstance(value, Resting) else value
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
    return _cast_fields(value, dtype) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    fresh = {name: new for name, old in held.items() if (new := cast(old, dtype)) is not old}
    if not fresh:
        return value
    made = copy.copy(value)
    for name, new in fresh.items():
        object.__setattr__(made, name, new)  # also where it is frozen
    return made


def dtype_named(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None
