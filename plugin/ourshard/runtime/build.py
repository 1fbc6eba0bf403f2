"""Build an engine: check the model on all ranks, plan lanes, fill them, take the parameters over.

Note [Where values come from]
A parameter whose values every rank can read by itself (`source.py`: its rows of a file, or random numbers drawn again)
is read so, and nothing is sent. All others come from rank 0, whatever the other ranks hold.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from ourshard.config import Codec, ShardConfig, Tier
from ourshard.runtime.attach import attach
from ourshard.runtime.buffer import give_back_unused
from ourshard.runtime.checks import checked_stock
from ourshard.runtime.disk import open_disk
from ourshard.runtime.engine import Engine
from ourshard.runtime.frozen import marks_of
from ourshard.runtime.host_room import check_host
from ourshard.runtime.in_backward import steps_in_backward
from ourshard.runtime.inventory import UnitParameters
from ourshard.runtime.keeping import kept_whole
from ourshard.runtime.lane import Lane
from ourshard.runtime.lane_plan import LaneRules, plan_lanes
from ourshard.runtime.lazy import give_up_values, materialize, source_of
from ourshard.runtime.ledger import Ledger
from ourshard.runtime.links import choose_codecs
from ourshard.runtime.mesh import Mesh
from ourshard.runtime.peer import PeerCopies, make_peer_copies
from ourshard.runtime.recompute import recompute_in_backward
from ourshard.runtime.tiers import disk_need, host_need, with_tiers
from ourshard.runtime.unit import Unit

logger = logging.getLogger("ourshard")


def build_engine(model: nn.Module, config: ShardConfig, mesh: Mesh, *, cast_small: bool) -> Engine:
    """Shard `model` in place and return its engine. Collective; raises `ValueError` on all ranks if one can't go on."""
    if mesh.world.rank == 0:
        _warn_of_narrow_masters(config.precision.master_dtype)
    engine = Engine(model, config, mesh, cast_small=cast_small, ledger=Ledger() if config.ledger else None)
    stock = checked_stock(model, engine)
    if Codec.AUTO in (config.communication.weights, config.communication.gradients):
        engine.chosen = choose_codecs(engine)
    rules = LaneRules(engine.config, mesh.shard.size, mesh.replicate.size, cast_small)  # without `auto`
    layouts = with_tiers([plan_lanes(entry.parameters, rules) for entry in stock], config.offload)
    if config.offload.active:
        check_host(engine, model, host_need(layouts, config.offload, mesh.shard.size))
    if Tier.NVME in config.offload.tiers:
        engine.disk = open_disk(engine, disk_need(layouts, config.offload, mesh.shard.size))
    readable = _readable(stock, engine)
    kept = kept_whole(layouts, [entry.rooted for entry in stock], config)
    for index, (entry, layout) in enumerate(zip(stock, layouts, strict=True)):
        unit = Unit(engine, index, entry.name, entry.modules, rooted=entry.rooted)
        unit.kept = kept[index]
        engine.units.append(unit)
        unit.build(layout, entry.parameters)
        for lane in unit.lanes:
            _fill(lane, engine, readable)
        unit.take_over()
    for tensor in model.parameters():
        materialize(tensor)  # those that ourshard was told to leave alone
    if config.activation_checkpointing:
        recompute_in_backward(model, [module for unit in engine.units for module in unit.modules], engine.inputs)
    engine.in_backward = steps_in_backward(engine)
    _find_peers(engine)
    _share_buffers(model, engine)
    engine.buffers.watch(model)
    give_back_unused(mesh.device)
    attributes = dict(vars(model))
    vars(model).clear()  # first, so that pickling meets the engine, which says what to do, and not a hook
    vars(model).update({"_ourshard": engine, **attributes})
    attach(engine, model)
    engine.as_sharded = marks_of(engine, model)
    return engine


def _warn_of_narrow_masters(master_dtype: str) -> None:
    """Say what is lost where the optimizer itself steps 16 bits (C03)."""
    dtype = getattr(torch, master_dtype)
    if torch.finfo(dtype).bits < 32:
        smallest = round(4 / torch.finfo(dtype).eps)
        logger.warning(
            "precision.master_dtype: %s: a step that changes a weight by less than 1/%d of it is rounded away. Leave "
            "master_dtype out for float32 masters.",
            master_dtype,
            smallest,
        )


def _find_peers(engine: Engine) -> None:
    """Move gathers and reductions to the copy engines, where the machine can. Collective."""
    wanted = engine.config.communication
    found: PeerCopies | str = "peers pull no messages of a codec, nor in two hops"
    if not wanted.active and engine.collectives.hops is None:
        found = make_peer_copies(engine)
    if isinstance(found, PeerCopies):
        engine.collectives.peer = engine.peer = found
    else:
        engine.without_peers = found


def _readable(stock: list[UnitParameters], engine: Engine) -> set[str]:
    """Return the names of the parameters that every rank has a source of: Note [Where values come from]. Collective."""
    parameters = [parameter for entry in stock for parameter in entry.parameters]
    mine = bytes(source_of(parameter.tensor) is not None for parameter in parameters)
    everywhere = zip(*engine.control.gather_objects(mine, "comparing sources"), strict=True)  # type: ignore[call-overload]
    return {parameter.name for parameter, flags in zip(parameters, everywhere, strict=True) if all(flags)}


@torch.no_grad()
def _fill(lane: Lane, engine: Engine, readable: set[str]) -> None:
    """Give every rank its part of the values: Note [Where values come from]."""
    sent = [position for position, parameter in enumerate(lane.parameters) if parameter.name not in readable]
    if sent:
        whole = torch.zeros(lane.layout.numel, dtype=lane.store_dtype, device=lane.device)
        if engine.mesh.world.rank == 0:
            for position in sent:
                lane.whole_view(whole, position).copy_(lane.parameters[position].tensor)
        engine.collectives.broadcast(whole, engine.mesh.world, lane.unit.label)
        lane.load(whole)
    for position, parameter in enumerate(lane.parameters):
        source = source_of(parameter.tensor) if position not in sent else None
        if source is not None:
            rows, granule = lane.rows(position), lane.layout.tensors[position].granule
            mine = lane.rows_view(lane.master, position).view(-1)
            for offset, block in source.blocks(rows.start * granule, rows.stop * granule):
                mine[offset : offset + block.numel()].copy_(block)
        give_up_values(parameter.tensor)


@torch.no_grad()
def _share_buffers(model: nn.Module, engine: Engine) -> None:
    """Give every rank rank 0's buffers, persistent or not, cast to `buffer_dtype` if one is set."""
    wanted = getattr(torch, engine.config.precision.buffer_dtype) if engine.config.precision.buffer_dtype else None
    for name, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is None:
                continue
            value = torch.empty_like(buffer, device=engine.mesh.device) if buffer.is_meta else buffer
            dtype = wanted if wanted is not None and buffer.is_floating_point() else buffer.dtype
            value = value.to(engine.mesh.device, dtype).contiguous()
            engine.collectives.broadcast(value, engine.mesh.world, f"buffer {name}.{attribute}")
            module._buffers[attribute] = value
