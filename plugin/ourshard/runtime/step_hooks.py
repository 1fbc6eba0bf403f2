"""Hooks of optimizers whose classes do not call torch's constructor: those around another one."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch.optim import Optimizer


def add_hooks(optimizer: Optimizer) -> None:
    """Give an optimizer the hooks that torch's constructor makes, where its class does not call that.

    Wrappers of another optimizer (Lookahead) leave it out. torch adds them to one that is unpickled, and changes the
    step of its whole class, whose other objects may have none.
    """
    if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        return
    kind: Any = type(optimizer)
    has_step = hasattr(kind.step, "hooked")
    vars(optimizer).setdefault("defaults", {})
    Optimizer.__setstate__(optimizer, {})
    if not has_step:
        optimizer.step = MethodType(kind.step, optimizer)  # type: ignore[method-assign]
        kind.step = kind.step.__wrapped__
