"""Whole values written into a sharded model from outside, without communication.

Note [Writing]
Each rank is given the same whole tensor and takes its rows: `load_state_dict`, `parameter.copy_(whole)`, PEFT's
`load_adapter`. A rank that writes while another does not would leave rows of two versions in one parameter; therefore
the first forward after a write is agreed on, and ranks that wrote differently often are told so there.

Who writes in place to what the groups of an optimizer hold (a decay of his own, limits for weights, an optimizer around
another) writes masters. torch counts that, and the next forward or `gathered` takes it in. Not what goes past the
count, by `.data`: up to stage 2 that is seen after the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ourshard.runtime.lazy import source_of
from ourshard.runtime.placement import At
from ourshard.runtime.wording import counted

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.unit import Unit


@torch.no_grad()
def write_whole(lane: Lane, position: int, value: torch.Tensor) -> None:
    """Take this rank's rows of `value`, whole, into the master; a lazy value is read no further than that."""
    rows, granule = lane.rows(position), lane.layout.tensors[position].granule
    start, stop = rows.start * granule, rows.stop * granule
    source = source_of(value)
    lane.unit.engine.land_masters()
    # A whole parameter that the user holds may have been moved (`model.to(dtype)`): it is the truth.
    kept = lane.resting[position].detach() if lane.placement.whole else lane.rows_view(lane.master, position)
    if source is None:
        kept.view(-1).copy_(value.detach().reshape(-1)[start:stop])
        return
    for offset, block in source.blocks(start, stop):
        kept.view(-1)[offset : offset + block.numel()].copy_(block)


@torch.no_grad()
def take_whole(lane: Lane) -> None:
    """Take changed elements of the whole parameters into the masters; unchanged ones keep the master's precision."""
    if lane.aliased:
        return
    seen = (lane.full.tensor if lane.placement.whole else lane.own).to(lane.master.device)
    changed = seen != lane.master.to(lane.compute_dtype)
    torch.where(changed, seen.to(lane.store_dtype), lane.master, out=lane.master)


def agree_on_writes(engine: Engine) -> None:
    """Take in what was written to groups, and see that all ranks wrote as often: Note [Writing]."""
    take_group_writes(engine.units)
    if engine.writes:
        writes = counted(engine.writes, "write")
        engine.control.agree(f"the first forward after {writes} of parameters (copy_, load_state_dict)")
        engine.writes = 0


def take_group_writes(units: Iterable[Unit]) -> None:
    """Forget whole parameters of whose masters optimizer groups were written to since the last step: Note [Writing]."""
    for unit in units:
        for lane in unit.lanes:
            for run in lane.runs:
                if run.version != run.parameter._version:
                    torch.autograd.graph.increment_version(run.newly_stepped())
                    written(lane)


def written(lane: Lane) -> None:
    """Forget whole parameters that a write left behind: Note [Writing]."""
    unit = lane.unit
    if lane.placement.params is At.SHARD:
        unit.held = False
        unit.release()
    unit.mark_stale()
    unit.engine.writes += 1
