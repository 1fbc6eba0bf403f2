"""What coded gradients keep from step to step, in a checkpoint: residuals of error feedback, and numbers of reductions.

Residuals are of one rank each (Note [Error feedback] in runtime/coded_gradients.py): a checkpoint has a row for each
rank, under a name that tells the layout too. Where world or layout are others, training goes on with zeros, and rank 0
says so: what had been lost by coding, and not been sent yet, is lost then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping

import torch

from ourshard.runtime.coded_gradients import GradientCoder, Site
from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.wording import counted

from .portions import places_digest
from .shard_writer import LocalBox
from .source import EXTRA_PREFIX, Source, TensorKey
from .staging import ToHost

logger = logging.getLogger("ourshard")

RESIDUAL = f"{EXTRA_PREFIX}residual"
REDUCTIONS = TensorKey(f"{EXTRA_PREFIX}reductions", "lanes")


def take_coding(engine: Engine, boxes: MutableMapping[TensorKey, list[LocalBox]], to_host: ToHost, lead: bool) -> None:
    """Add this rank's residuals to `boxes`; where it leads the numbers of reductions too, which all have alike."""
    world = engine.mesh.world
    for key, residual in _residuals(engine):
        boxes[key] = [LocalBox((world.size, residual.numel()), to_host(residual.view(1, -1)), (world.rank, 0))]
    counts = torch.tensor([coder.reductions for coder in _coders(engine)], device="cpu")
    if lead and any(coder.codec.stochastic for coder in _coders(engine)):
        boxes[REDUCTIONS] = [LocalBox(tuple(counts.shape), counts)]


def restore_coding(engine: Engine, source: Source) -> None:
    """Put this rank's residuals and the numbers of reductions back; zeros where the checkpoint has none that fit."""
    world = engine.mesh.world
    wanted = dict(_residuals(engine))
    saved = {key for key in source.tensors if key.kind == RESIDUAL}
    fits = saved == wanted.keys() and all(source.tensors[k].shape == (world.size, r.numel()) for k, r in wanted.items())
    if fits:
        for key, residual in wanted.items():
            residual.copy_(source.read_run(key, world.rank * residual.numel(), (world.rank + 1) * residual.numel()))
    else:
        writers = counted(source.description.world_size or 0, "rank")
        begin_anew(engine, f"the checkpoint has those of {writers} in another layout" if saved else "it has none")
    coders = list(_coders(engine))
    counts = source.read(REDUCTIONS).tolist() if REDUCTIONS in source.tensors else [0]
    if len(counts) != len(coders):
        counts = [max(counts)] * len(coders)  # of another layout: noise that no lane has had
    for coder, count in zip(coders, counts, strict=True):
        coder.reductions = count


def begin_anew(engine: Engine, why: str) -> None:
    """Set residuals to zero, if there are any, and say so on rank 0."""
    residuals = [residual for _, residual in _residuals(engine)]
    if residuals and engine.mesh.world.rank == 0:
        logger.warning("load: residuals of error feedback begin at zero: %s.", why)
    for residual in residuals:
        residual.zero_()


def _coders(engine: Engine) -> Iterator[GradientCoder]:
    return (lane.coder for lane in engine.lanes() if lane.coder is not None)


def _residuals(engine: Engine) -> Iterator[tuple[TensorKey, torch.Tensor]]:
    for lane in engine.lanes():
        for site, residual in (lane.coder.residuals if lane.coder is not None else {}).items():
            yield TensorKey(RESIDUAL, _name(lane, site)), residual


def _name(lane: Lane, site: Site) -> str:
    """Return a name that no other lane, site or layout has."""
    return f"{lane.name_of(0)}.{site.value}.{places_digest(lane)}"
