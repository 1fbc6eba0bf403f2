"""Which rows the state dict of an optimizer is of.

Where masters are shards, an optimizer has this rank's rows (Note [Runs] in run.py), and so has its `state_dict()`. Its
tensors would load on another rank, over other rows, or not fit by chance alone. So it says whose rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ourshard.runtime.run import Run

KEY = "ourshard"
_DO = (
    "`accelerator.save_state` and `load_state` (or `ourshard.save` and `ourshard.load`), on all ranks, do it for any "
    "number of ranks. The state of a plain optimizer can be loaded before that is prepared."
)


def mark(state: dict[str, Any], runs: Sequence[Run]) -> None:
    """Say in the state dict of an optimizer which rows it has."""
    if runs:
        state[KEY] = {"rank": runs[0].lane.rank, "rows": _rows(runs)}


def check(optimizer: Optimizer, state: dict[str, Any], runs: Sequence[Run]) -> None:
    """Raise ValueError if a state dict has state of other rows than those that `optimizer` steps."""
    marked = state.get(KEY)
    if not state.get("state") or (marked["rows"] if marked else []) == _rows(runs):
        return
    its = f"the rows of rank {marked['rank']}" if marked else "whole parameters"
    here = f"rank {runs[0].lane.rank} steps other rows" if runs else "the optimizer steps whole parameters"
    raise ValueError(f"{type(optimizer).__name__}.load_state_dict: this is the state of {its}, and {here}. {_DO}")


def _rows(runs: Sequence[Run]) -> list[str]:
    return [
        f"{run.lane.name_of(run.positions[0])} and {len(run.positions) - 1} more, {run.start}:{run.stop} of part "
        f"{run.lane.part} of {run.lane.spread.size}, stepped {'here' if run.owner is None else run.owner}"
        for run in runs
    ]
