"""Parameters that come into a model after it was sharded.

Note [Newcomers]
----------------
A parameter that is registered later is in no unit: nobody would reduce its gradient or save it, and each rank would
train its own. torch tells of every registration in the process; those in a module of a sharded model are counted. The
next forward with gradient of a model looks for newcomers if there was any.

Registrations elsewhere say nothing: transformers takes a slice of a model's layers in each forward, a new list in which
all of them are registered, and to look for newcomers costs the host 300 calls a layer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ourshard.runtime.handle import ShardParameter
from ourshard.runtime.wrap import canonical

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine


class _Registrations:
    """How often anything was registered in a module of a sharded model."""

    def __init__(self) -> None:
        self.count = 0
        self.modules: set[int] = set()  # ids of theirs; one that another module has got by now costs a look
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            register_module_parameter_registration_hook(self._add)
            register_module_module_registration_hook(self._add)

    def _add(self, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self.modules:
            self.count += 1


_REGISTRATIONS = _Registrations()


class Newcomers:
    """What looks for parameters that a model has got since it was sharded: Note [Newcomers]."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        _REGISTRATIONS.watch()
        self._modules: set[int] = set()
        weakref.finalize(self, _REGISTRATIONS.modules.difference_update, self._modules)
        self._follow_modules()

    def _follow_modules(self) -> None:
        """Take in which modules the model has, with those that came without parameters."""
        model = self._engine.model()
        if model is not None:
            self._modules.update(map(id, model.modules()))
            _REGISTRATIONS.modules.update(self._modules)
        self._seen = _REGISTRATIONS.count

    def refuse(self) -> None:
        """Raise `RuntimeError` if the model has a parameter to train that no unit has."""
        if self._seen == _REGISTRATIONS.count:
            return
        names = self._names()
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"The parameter {names[0]!r}{more} came into the model after it was sharded: each rank would train its "
                "own, and no checkpoint would have it. Change the model (add adapters or heads, resize embeddings, "
                "parametrize or prune weights) before `prepare`, or take a frozen one (`requires_grad_(False)`)."
            )
        self._follow_modules()

    def _names(self) -> list[str]:
        engine = self._engine
        model = engine.model()
        if model is None:
            return []
        known = {id(tensor) for lane in engine.lanes() for tensor in (*lane.resting, *lane.leaves)}
        ignored = tuple(f"{name}." for name in engine.config.wrap.ignore)
        named = ((canonical(name), tensor) for name, tensor in model.named_parameters())
        return [
            name
            for name, tensor in named
            if tensor.requires_grad
            and not isinstance(tensor, ShardParameter)
            and id(tensor) not in known
            and not name.startswith(ignored)
        ]
