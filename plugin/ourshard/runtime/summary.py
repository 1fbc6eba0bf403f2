"""What a run says of itself at its start: how the model is sharded, and which options have no effect and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from ourshard.config import Accumulate, Codec, ShardConfig, Tier
from ourshard.runtime.coded_gradients import in_two_hops
from ourshard.runtime.divided import divides_masters, effective_stage
from ourshard.runtime.mesh import first_hop, local_size
from ourshard.runtime.placement import At
from ourshard.runtime.wording import counted
from ourshard.values import flatten

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.unit import Unit

_MIB = 2**20
_MOST_ITEMS = 8  # of the list of units


def summary(engine: Engine) -> str:
    """Return a few lines: stage, mesh, units, lanes, dtypes, tiers, bytes a rank, and what is inactive."""
    lanes = list(engine.lanes())
    config, mesh = engine.config, engine.mesh
    over_all = ", masters over all ranks" if divides_masters(config, mesh.replicate.size) else ""
    parts = [
        f"stage {config.stage} over {mesh.describe} on {mesh.device.type}{over_all}",
        _parameters(engine, lanes),
        f"compute/reduce/master dtypes {', '.join(sorted({_dtypes(lane) for lane in lanes}))}",
        _tiers(engine),
        *([engine.chosen] if engine.chosen else []),
        *_transport(engine),
        _memory(engine, lanes),
        _gradients(engine),
    ]
    lines = ["ourshard: " + "; ".join(parts), f"ourshard: elements of units: {_sizes(engine)}"]
    lines += [f"ourshard: {key} has no effect: {reason}" for key, reason in inactive(engine).items()]
    return "\n".join(lines)


def _parameters(engine: Engine, lanes: list[Lane]) -> str:
    elements = sum(p.numel for lane in lanes for p in lane.parameters)
    trainable = sum(p.numel for lane in lanes if lane.trainable for p in lane.parameters)
    whole = sum(p.numel for lane in lanes if lane.placement.whole for p in lane.parameters)
    padding = sum(lane.layout.padding for lane in lanes)
    largest = max(engine.units, key=_elements)
    units, count = counted(len(engine.units), "unit"), counted(elements, "parameter")
    return (
        f"{count} ({trainable:,} trainable, {whole:,} whole on every rank, {padding:,} padding) in "
        f"{units}, {counted(len(lanes), 'lane')}, the largest unit {largest.label} with {_elements(largest):,}"
    )


def _sizes(engine: Engine) -> str:
    """List all units; neighbours of one size are one item, and of many items the last are left out."""
    runs = [list(run) for _, run in groupby(engine.units, _elements)]
    items = [f"{_from_to(run)} {_elements(run[0]):,}{' each' if len(run) > 1 else ''}" for run in runs[:_MOST_ITEMS]]
    left = sum(len(run) for run in runs[_MOST_ITEMS:])
    return ", ".join([*items, *([f"{counted(left, 'more unit')}"] if left else [])])


def _from_to(run: list[Unit]) -> str:
    return run[0].label if len(run) == 1 else f"{run[0].label} to {run[-1].label}"


def _elements(unit: Unit) -> int:
    return sum(p.numel for lane in unit.lanes for p in lane.parameters)


def _dtypes(lane: Lane) -> str:
    reduce = _short(lane.reduce_dtype) if lane.trainable else "-"
    return f"{_short(lane.compute_dtype)}/{reduce}/{_short(lane.store_dtype)}"


def _tiers(engine: Engine) -> str:
    names = {Tier.NONE: "the device", Tier.CPU: "the host", Tier.NVME: "a disk"}
    offload = engine.config.offload
    inputs = ", inputs of recomputed units on the host" if engine.inputs is not None else ""
    if not offload.active:
        return f"masters, optimizer and parameters on the device{inputs}" if inputs else "all on the device"
    part = "" if offload.optimizer_ratio == 1.0 else f"{_part_that_left(engine):.0%} of "
    return f"{part}masters and optimizer on {names[offload.optimizer]}, parameters on {names[offload.params]}{inputs}"


def _transport(engine: Engine) -> Iterator[str]:
    """Yield what moves bytes between GPUs; nothing on CPUs, and where nothing is moved."""
    if engine.mesh.device.type == "cuda" and engine.mesh.shard.size > 1:
        yield f"NCCL moves the bytes ({engine.without_peers})" if engine.peer is None else "copy engines move the bytes"


def _gradients(engine: Engine) -> str:
    early = _stage(engine) >= 2 and engine.config.accumulate is Accumulate.SHARDED
    stepped = ", stepped in backward and let go" if engine.in_backward is not None else ""
    return f"gradients are {'shards, reduced in each backward' if early else 'whole, reduced once a step'}{stepped}"


def _part_that_left(engine: Engine) -> float:
    """Return the part of the sharded elements whose masters are not on the device."""
    lanes = [lane for lane in engine.lanes() if lane.trainable and not lane.placement.whole]
    return sum(x.layout.numel for x in lanes if x.offloaded) / max(1, sum(x.layout.numel for x in lanes))


def _memory(engine: Engine, lanes: list[Lane]) -> str:
    masters = sum(lane.master.nbytes for lane in lanes)
    stepped = sum(lane.master.nbytes for lane in lanes if lane.trainable)
    slot = max(
        (sum(lane.full.nbytes for lane in unit.lanes if lane.placement.params is At.SHARD) for unit in engine.units),
        default=0,
    )
    secondary = sum(lane.secondary.tensor.nbytes for lane in lanes if lane.secondary is not None)
    return (
        f"a rank holds masters of {masters / _MIB:,.1f} MiB (AdamW's state is {2 * stepped / _MIB:,.1f} MiB), "
        f"{f'secondary shards of {secondary / _MIB:,.1f} MiB, ' if secondary else ''}"
        f"largest slot {slot / _MIB:,.1f} MiB"
    )


def inactive(engine: Engine) -> dict[str, str]:
    """Return the keys that were set and change nothing in this run, with the reason."""
    mine, default = flatten(engine.config.to_dict()), flatten(ShardConfig().to_dict())
    reasons = [*_without_shards(engine), *_by_stage(engine), *_of_host(engine), *_of_codecs(engine), *_of_hops(engine)]
    reasons += _of_casts(engine)
    return {key: reason for key, reason in reasons if key == "stage" or mine[key] != default[key]}


def _stage(engine: Engine) -> int:
    return effective_stage(engine.config, engine.mesh.shard.size, engine.mesh.replicate.size)


def _without_shards(engine: Engine) -> Iterator[tuple[str, str]]:
    left = _stage(engine)
    if left != engine.config.stage:
        then = f"parameters stay whole as at stage {left}" if left else "nothing is sharded"
        yield "stage", f"one rank has a whole copy of the model (by shard_size, or since it is alone), so {then}"
    if engine.mesh.world.size == 1:
        yield "timeout", "one rank waits for no other"
        yield "communication.reduce_op", "one rank has no gradients to add to its own"
    if engine.mesh.replicate.size == 1:
        yield "shard_optimizer_over", "there is one replica"
    elif engine.config.stage == 0:
        yield "shard_optimizer_over", "stage 0 has whole masters"
    if engine.mesh.device.type != "cuda":
        yield "communication.transport", "gloo moves the bytes between CPUs"
        yield "cuda_graph", "there is no GPU"


def _by_stage(engine: Engine) -> Iterator[tuple[str, str]]:
    config = engine.config
    stage = _stage(engine)
    if stage == 0 and config.stage == 0:
        yield "shard_size", "stage 0 has no shards"
    if stage < 3:
        for key in ("reshard_after_forward", "keep_last", "prefetch.forward", "prefetch.backward"):
            yield key, "parameters stay whole, nothing is gathered in a forward or backward"
    elif not any(unit.kept for unit in engine.units):
        yield "keep_last", "the last unit that is gathered by itself has more elements, or there is none"
    if all(lane.secondary is None for lane in engine.lanes()):
        yield "secondary_shard_size", "no unit but the root is sharded, and the root is gathered once"
    if engine.in_backward is None:
        yield "optimizer_in_backward", "no unit but the root is sharded, and the rest waits for the optimizer's step"
    if stage < 2 and config.accumulate is Accumulate.DEFERRED:
        yield "accumulate", "whole gradients are reduced when syncing at this stage anyway"


def _of_host(engine: Engine) -> Iterator[tuple[str, str]]:
    if Tier.NVME not in (engine.config.offload.optimizer, engine.config.offload.params):
        yield "offload.nvme_path", "nothing is on a disk"
        yield "offload.windows", "nothing is on a disk"
    if not engine.config.offload.active:
        if engine.inputs is None:
            yield "offload.pin_memory", "nothing is on the host"
            yield "offload.max_pinned", "nothing is on the host"
        elif engine.mesh.device.type != "cuda":
            yield "offload.pin_memory", "without a GPU nothing is pinned"
            yield "offload.max_pinned", "without a GPU nothing is pinned"
        yield "offload.optimizer_ratio", "nothing is on the host"
        return
    if engine.mesh.device.type != "cuda":
        yield "offload.pin_memory", "without a GPU nothing is pinned"
        yield "offload.max_pinned", "without a GPU nothing is pinned"
    elif not engine.config.offload.pin_memory:
        yield "offload.max_pinned", "offload.pin_memory is false"
    left = any(lane.offloaded and lane.trainable for lane in engine.lanes())
    if engine.config.offload.optimizer is Tier.NONE:
        yield "offload.optimizer_ratio", "no master leaves the device"
    elif not left and engine.config.offload.optimizer_ratio < 1.0:
        yield "offload.optimizer", "no lane is as short as the optimizer_ratio of all elements"
    elif not left:
        yield "offload.optimizer", "no trainable parameter is as large as persist_below, and small ones stay"
    if not any(lane.rests_below for lane in engine.lanes()):
        yield "offload.params", "parameters are gathered from masters on the device, and no other shard rests there"


def _of_codecs(engine: Engine) -> Iterator[tuple[str, str]]:
    communication = engine.config.communication
    if not communication.active:
        yield "communication.block", "no codec is set"
        return
    why = "one rank shares a copy" if engine.mesh.shard.size == 1 else "no parameter has a size and dtype for it"
    coded = [lane for lane in engine.lanes() if lane.layout.key.coded]  # type: ignore[attr-defined]
    if communication.weights is not Codec.NONE and not any(lane.placement.params is At.SHARD for lane in coded):
        yield "communication.weights", why
    if communication.gradients is not Codec.NONE and not any(lane.trainable for lane in coded):
        yield "communication.gradients", why


def _of_casts(engine: Engine) -> Iterator[tuple[str, str]]:
    if engine.param_dtype is None:
        yield "precision.cast_inputs", "no dtype is set to cast to"
    elif engine.casts.autocast:
        yield "precision.cast_inputs", "autocast casts for single operations, and leaves inputs alone"


def _of_hops(engine: Engine) -> Iterator[tuple[str, str]]:
    if engine.collectives.hops is None:
        yield "communication.two_hop_gathers", "the ranks that share a copy are not several nodes of several ranks"
    elif all(lane.placement.whole for lane in engine.lanes()):
        yield "communication.two_hop_gathers", "no parameter is sharded"
    if _first_hop(engine) == first_hop(local_size(engine.mesh.world.size), engine.mesh.shard.size):
        yield "communication.node_size", "it is what the launcher says"


def _first_hop(engine: Engine) -> int:
    """Return the ranks of a node, where reductions or gathers have two hops; else 1."""
    node, cross = engine.mesh.node.size, engine.mesh.cross.size
    reductions = engine.config.communication.gradients is not Codec.NONE and in_two_hops(engine.config, node, cross)
    return node if reductions or engine.collectives.hops is not None else 1


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
