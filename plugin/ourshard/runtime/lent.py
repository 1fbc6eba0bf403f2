"""Whole parameters in a state dict, each on a storage of its own.

Note [Lent storages]
--------------------
Whole parameters are views of one flat buffer. Who writes files takes tensors on one storage for tied ones: accelerate
keeps the first of them and drops the others, safetensors' `save_model` refuses, `torch.save` of one writes the buffer.
So a state dict has the same memory behind storages that hold one parameter each, and one for all names of a tie. Each
has a view of the buffer, by which `gathered` sees that it is still held: Note [Kept after gathered] in kept.py. Where
nobody looks, as between a forward and its backward, a view stays a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ourshard.runtime.handle import Resting

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane

Lent = WeakValueDictionary[int, torch.Tensor]  # by the address of the parameter; while one is there, so is its memory


def lend_storages(engine: Engine) -> None:
    """Let the state dicts of the modules of a model have storages of their own: Note [Lent storages]."""
    lanes: dict[nn.Module, dict[str, Lane]] = {}
    for lane in engine.lanes():
        for site in [site for parameter in lane.parameters for site in parameter.sites]:
            lanes.setdefault(site.module, {})[site.attribute] = lane
    lent: Lent = WeakValueDictionary()
    for module, found in lanes.items():
        module.register_state_dict_post_hook(partial(_lend_all, found, lent))


def _lend_all(
    lanes: Mapping[str, Lane], lent: Lent, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Change a module's own part of a state dict; `lanes` are by the attribute of a parameter."""
    for attribute, lane in lanes.items():
        value = state.get(prefix + attribute)
        looked_at = lane.placement.whole or lane.unit.pinned
        if looked_at and isinstance(value, torch.Tensor) and not isinstance(value, (nn.Parameter, Resting)):
            _lend(value, lent)


def _lend(value: torch.Tensor, lent: Lent) -> None:
    """Put a view on a storage of its own; it goes on counting versions with the parameter."""
    if value.untyped_storage().nbytes() == value.nbytes or not value.numel() or not value.is_contiguous():
        return
    address = value.data_ptr()
    whole = lent.get(address)
    if whole is None:
        whole = from_dlpack(to_dlpack(value.view(-1).view(torch.uint8))).view(value.dtype)
    value.data = whole.view(value.shape)
    lent[address] = value
