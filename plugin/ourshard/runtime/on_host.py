"""Modules that show whole values on the host for a while, to code of others that saves them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ourshard.runtime.part import part_state
from ourshard.runtime.wrap import canonical


@contextmanager
def whole_on_host(
    module: nn.Module,
    label: str,
    *,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    keep: bool = True,
) -> Iterator[None]:
    """Let `module` hold plain, whole parameters on the CPU in a `with` block: to be written, not to compute with.

    Collective at its beginning, unless all is on this rank, and then no more. Without `keep` a rank takes part and
    its modules stay as they are. Values, names and dtypes are those of `part_state`; tied parameters stay one.
    """
    with showing(module, part_state(module, label, names=names, dtype=dtype, keep=keep)):
        yield


@contextmanager
def showing(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Let `module` hold the values of a whole state, by its names, in place of its parameters; no collective."""
    shown: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for prefix, owner in module.named_modules():
            for name, parameter in list(owner._parameters.items()):
                whole = state.get(canonical(f"{prefix}.{name}" if prefix else name))
                if parameter is None or whole is None:
                    continue
                before.append((owner, name, parameter))
                if id(parameter) not in shown:
                    shown[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                owner._parameters[name] = shown[id(parameter)]
        yield
    finally:
        for owner, name, parameter in before:
            owner._parameters[name] = parameter
