"""State that only the layout it was made in can read, in a whole file: each rank's tensors under a name of their own.

Note [Local state] in checkpoint/local_state.py says what it is. Names begin with the number of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ourshard.checkpoint.local_state import LocalRun, layout_misfits, local_runs, put_local
from ourshard.checkpoint.portions import ranks_of
from ourshard.checkpoint.tensor_classes import check_classes
from ourshard.runtime.engine import Engine

Local = dict[str, dict[str, Any]]  # name of a run and a part -> state key -> that rank's tensor


def gather(optimizer: Optimizer, engines: Sequence[Engine], *, keep: bool) -> Local:
    """Return the tensors of all parts, on the CPU; {} without `keep`. Collective."""
    mine = {
        f"{number}/{each.own}": {
            key: (tuple(value.shape), value.dtype) for key, value in each.tensors(optimizer).items()
        }
        for number, each in _runs(optimizer, engines)
    }
    told: list[Any] = engines[0].control.gather_objects(mine, "reading the optimizer's state")
    found: Local = {}
    for number, each in _runs(optimizer, engines):
        lane = each.run.lane
        for place, rank in enumerate(ranks_of(lane.spread, lane.rank)):
            name = f"{number}/{each.name}.{lane.parts[place]}"
            for key, (shape, dtype) in sorted(told[rank][name].items()):
                if rank == lane.rank:
                    value = each.tensors(optimizer)[key].detach().to(lane.device).contiguous()
                else:
                    value = torch.empty(shape, dtype=dtype, device=lane.device)
                lane.unit.engine.collectives.broadcast(value, lane.spread, f"state of {lane.unit.label}", place)
                if keep:
                    found.setdefault(name, {})[key] = value.cpu()
    return found


def of_engine(local: Local, number: int) -> Local:
    """Return what is of one model, without its number."""
    own = f"{number}/"
    return {name.removeprefix(own): tensors for name, tensors in local.items() if name.startswith(own)}


def misfits(optimizer: Optimizer, engines: Sequence[Engine], local: Local) -> Iterator[str]:
    """Yield why what was saved is not of this layout; raise CheckpointError if its classes are not here."""
    for number, engine in enumerate(engines):
        yield from layout_misfits(list(local_runs(engine, optimizer)), of_engine(local, number))
    for tensors in local.values():
        check_classes(tensors)


def restore(optimizer: Optimizer, engines: Sequence[Engine], local: Local) -> None:
    """Add this rank's tensors to the state."""
    for number, each in _runs(optimizer, engines):
        put_local(optimizer, each, local.get(f"{number}/{each.own}", {}))


def _runs(optimizer: Optimizer, engines: Sequence[Engine]) -> Iterator[tuple[int, LocalRun]]:
    for number, engine in enumerate(engines):
        for each in local_runs(engine, optimizer):
            yield number, each
