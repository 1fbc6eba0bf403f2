"""Which frozen parameters are as they were when the model was sharded, so that a checkpoint may leave them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ourshard.config import FrozenWeights

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane

_PRIME = 8191  # places count up to it, so that rows that changed places show
_BLOCK = 512 * _PRIME  # elements that are summed at once
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Mark = tuple[int, int]
_TRAINED: Mark = (-1, -1)  # unlike all that are taken


def marks_of(engine: Engine, model: nn.Module) -> dict[str, Mark]:
    """Return a mark of each frozen parameter that a checkpoint may leave out, by name; it changes with the values.

    Shards are reached through the engine alone, so that torch's count of writes to them tells. Whole parameters are in
    the user's hands, who may write to their `.data`: their values are summed.
    """
    wanted = engine.config.checkpoint.frozen
    if wanted is FrozenWeights.INCLUDE or (wanted is FrozenWeights.AUTO and not has_adapters(model)):
        return {}
    return {
        parameter.name: mark_of(lane, position)
        for lane in engine.lanes()
        if not lane.trainable
        for position, parameter in enumerate(lane.parameters)
    }


def mark_of(lane: Lane, position: int) -> Mark:
    stored = lane.stored(position)
    return stored.data_ptr(), checksum(stored, 0) if lane.placement.whole else stored._version


def unchanged(engine: Engine) -> set[str]:
    """Return the names of those in `engine.as_sharded` that are on this rank as they were."""
    return {
        parameter.name
        for lane in engine.lanes()
        for position, parameter in enumerate(lane.parameters)
        if parameter.name in engine.as_sharded and mark_of(lane, position) == engine.as_sharded[parameter.name]
    }


def forget(engine: Engine, names: Iterable[str]) -> None:
    """Note that parameters are trained from now on."""
    engine.as_sharded.update({name: _TRAINED for name in names if name in engine.as_sharded})


def has_adapters(model: nn.Module) -> bool:
    """Say whether PEFT has put adapters into the model, or transformers with it."""
    return any({"peft_config", "_peft_config"} & vars(module).keys() for module in model.modules())


def checksum(values: torch.Tensor, start: int) -> int:
    """Add up the words of `values`, each times its place modulo a prime, of which the first is `start`; modulo 2^64."""
    words = values.contiguous().reshape(-1).view(_WORDS[values.element_size()])
    columns = torch.zeros(_PRIME, dtype=torch.int64, device=words.device)  # sums of the words of one place each
    whole = words.numel() - words.numel() % _PRIME
    for first in range(0, whole, _BLOCK):
        columns += words[first : min(first + _BLOCK, whole)].view(-1, _PRIME).sum(0, dtype=torch.int64)
    columns[: words.numel() - whole] += words[whole:]
    places = torch.arange(start, start + _PRIME, device=words.device).remainder_(_PRIME).add_(1)
    return int((columns * places).sum().item())
