"""Masters in a whole file of an optimizer, where the file of the weights rounds them.

Weights are saved in the dtype that they were loaded in, or `checkpoint.save_dtype`. Where that has fewer bits than the
masters, a run that is resumed from the weights alone goes on from other values. So the masters lie beside the state of
the optimizer, under the same keys. They count where they round to the weights that are there: weights that were
replaced since stay.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.state import save_dtype

_SAVED = (torch.bfloat16, torch.float16)  # what a file may have rounded masters to


def gather(lane: Lane, positions: Mapping[str, int], *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the whole masters of a lane, of those of its parameters whose weights are saved in fewer bits.

    Collective; {} without `keep`. `positions` has the parameters that are stepped, the same on all ranks.
    """
    name = lane.unit.engine.config.checkpoint.save_dtype
    wanted = getattr(torch, name) if name else None
    rounded = {
        key: position
        for key, position in positions.items()
        if save_dtype(lane.parameters[position].dtype, wanted).itemsize < lane.store_dtype.itemsize
    }
    if not rounded:
        return {}
    whole = lane.gather_master()
    return {key: lane.whole_view(whole, at).to("cpu", copy=True) for key, at in rounded.items()} if keep else {}


@torch.no_grad()
def restore(engine: Engine, places: Mapping[str, tuple[Lane, int]], saved: Mapping[str, torch.Tensor]) -> None:
    """Take this rank's rows of masters that round to the weights that it has."""
    found = [(lane, position, saved[key]) for key, (lane, position) in places.items() if key in saved]
    if not found:
        return
    engine.land_masters()
    for lane, position, value in found:
        rows, granule = lane.rows(position), lane.layout.tensors[position].granule
        kept = lane.resting[position].detach() if lane.placement.whole else lane.rows_view(lane.master, position)
        own = value.reshape(-1)[rows.start * granule : rows.stop * granule].view(kept.shape).to(kept.device, kept.dtype)
        for dtype in _SAVED:
            kept.copy_(torch.where(own.to(dtype) == kept, own, kept))
    engine.masters_changed()
