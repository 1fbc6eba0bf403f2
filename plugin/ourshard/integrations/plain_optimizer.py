"""Optimizer states by parameter name (`optimizer_state.py`) to and from the form that torch's optimizers save.

torch numbers parameters in the order in which the optimizer was given them. A run's optimizer no longer knows that
order; the Trainer, and most code, gives the parameters of a group in the order of `named_parameters`, and so do we.
The names are written beside the numbers (`param_names`, torch's own key for them), and count where they are there.

State that only our layout can read (Note [Local state] in checkpoint/local_state.py) has no such form: the file then
holds what `gather` returned under one key, `ourshard`, and no torch optimizer takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ourshard.checkpoint.source import MASTERS, OURS
from ourshard.integrations import optimizer_state
from ourshard.runtime.engine import Engine
from ourshard.runtime.wording import counted
from ourshard.runtime.wrap import canonical

NAMES = "param_names"


def to_plain(whole: dict[str, Any], model: nn.Module, engines: Sequence[Engine]) -> dict[str, Any]:
    """Return what `optimizer_state.gather` returned as torch's `state_dict` of an optimizer that is not sharded."""
    if optimizer_state.LOCAL in whole:
        return {OURS: whole}
    ranks = {key: rank for rank, key in enumerate(_keys(model, engines))}
    numbers: dict[str, int] = {}
    groups = []
    for group in whole["param_groups"]:
        keys = sorted(group["params"], key=lambda key: ranks.get(key, len(ranks)))
        numbers.update({key: len(numbers) + place for place, key in enumerate(keys)})
        names = [key.partition("/")[2] for key in keys]
        groups.append({**group, "params": [numbers[key] for key in keys], NAMES: names})
    beside = {MASTERS: whole[MASTERS]} if MASTERS in whole else {}
    state = {numbers[key]: _apart(values) for key, values in whole["state"].items()}
    return {"state": state, "param_groups": groups, **beside}


def _apart(state: dict[str, Any]) -> dict[str, Any]:
    """Give a parameter a step count of its own: those of one run share theirs, and torch would count it up for each."""
    return {k: v.clone() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for k, v in state.items()}


def from_plain(
    saved: dict[str, Any], optimizer: Optimizer, model: nn.Module, engines: Sequence[Engine]
) -> dict[str, Any]:
    """Return a torch `state_dict` of an optimizer in the form that `optimizer_state.restore` takes.

    Raises:
        ValueError: the state has no names, and its groups are not as long as this optimizer's.
    """
    if OURS in saved:
        return saved[OURS]  # type: ignore[no-any-return]
    groups: list[dict[str, Any]] = []
    keys: dict[int, str] = {}
    mine = optimizer_state.keys_by_group(optimizer, engines)
    order = list(_keys(model, engines))
    known = {key.partition("/")[2]: key for key in order}
    for place, group in enumerate(saved["param_groups"]):
        if NAMES in group:
            names = [known.get(canonical(name), f"0/{name}") for name in group[NAMES]]
        else:
            names = sorted(mine[place] if place < len(mine) else (), key=order.index)
        if len(names) != len(group["params"]):
            raise ValueError(
                f"The saved optimizer has {counted(len(group['params']), 'parameter')} in group {place}, this one "
                f"{len(names)}, and no names to match them by. Build the optimizer as it was built when the state was "
                "saved."
            )
        keys.update(zip(group["params"], names, strict=True))
        groups.append({**{k: v for k, v in group.items() if k != NAMES}, "params": names})
    state = {keys[number]: values for number, values in saved["state"].items()}
    return {"state": state, "param_groups": groups, **({MASTERS: saved[MASTERS]} if MASTERS in saved else {})}


def _keys(model: nn.Module, engines: Sequence[Engine]) -> Iterator[str]:
    """Yield the keys of the model's parameters in the order of `named_parameters`."""
    numbers = {
        id(parameter): number
        for number, engine in enumerate(engines)
        for lane in engine.lanes()
        for parameter in lane.resting
    }
    for name, parameter in model.named_parameters():
        if id(parameter) in numbers:
            yield f"{numbers[id(parameter)]}/{canonical(name)}"
