"""After an out-of-memory error: what took the memory, and the cheapest change of the config that would fit."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ourshard.config import Accumulate, OptimizerOver, ShardConfig, Tier
from ourshard.planning.exhaustion import Place, exhausted
from ourshard.planning.formulas import OPTIMIZERS, Optimizer
from ourshard.planning.layouts import PlannedModel, plan_model
from ourshard.planning.memory import Memory, memory_of
from ourshard.planning.moves import MeshSizes
from ourshard.planning.rehearsal import Rehearsal
from ourshard.planning.trace import Visit
from ourshard.planning.variants import variant
from ourshard.runtime.wording import memory_text


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a config, and the bytes that it saves on each rank when most is allocated."""

    key: str
    value: str
    saves: int
    price: str  # what it costs


def runtime_memory(
    model: nn.Module, config: ShardConfig, mesh: MeshSizes, optimizer: Optimizer = OPTIMIZERS["adamw"]
) -> Memory:
    """Return what the runtime and the optimizer hold for `model`, sharded or not, without its activations."""
    planned = plan_model(model, config, mesh)
    moves = Rehearsal(planned, config, mesh, _bare_visits(planned)).settled()
    return memory_of(planned, moves, optimizer, workspace=0)


def _bare_visits(planned: PlannedModel) -> list[Visit]:
    """Return a pass through the units that computes nothing: what the runtime holds does not depend on more."""
    root = len(planned.units) - 1
    inner = [index for index, unit in enumerate(planned.units) if not unit.rooted]
    fixtures = tuple(index for index, unit in enumerate(planned.units[:-1]) if unit.rooted)
    return [
        *(Visit(unit, False, {}, 0, 0) for unit in (*inner, root)),
        Visit(root, True, {}, 0, 0, graded=fixtures),
        *(Visit(unit, True, {}, 0, 0) for unit in reversed(inner)),
    ]


def changes(model: nn.Module, config: ShardConfig, mesh: MeshSizes) -> list[Change]:
    """Return the changes that save memory, the cheapest first."""
    now = runtime_memory(model, config, mesh).peak
    found = []
    for key, value, changed, sizes, price in _alternatives(config, mesh):
        if changed is None:  # does not go with what else the config says
            continue
        saves = now - runtime_memory(model, changed, sizes).peak
        if saves > 0:
            found.append(Change(key, value, saves, price))
    return found


def _alternatives(
    config: ShardConfig, mesh: MeshSizes
) -> Iterator[tuple[str, str, ShardConfig | None, MeshSizes, str]]:
    """Yield (key, value, config, mesh, price) for what can be changed, from no price to a high one."""
    sharded = MeshSizes(mesh.world, node=mesh.node)
    if mesh.shard == 1 and config.stage > 0:
        yield "shard_size", "null", variant(config, shard_size=None), sharded, "gathers leave the node"
        return
    if config.stage in (0, 1):
        yield "stage", "2", variant(config, stage=2), mesh, "no more bytes on the wire"
    if config.accumulate is Accumulate.DEFERRED and config.stage >= 2:
        change = variant(config, accumulate="sharded")
        yield "accumulate", "sharded", change, mesh, "a reduction for each micro-batch"
    if config.stage < 3:
        yield "stage", "3", variant(config, stage=3), mesh, "half again as many bytes on the wire"
    if config.stage == 3 and not config.reshard_after_forward:
        change = variant(config, reshard_after_forward=True)
        yield "reshard_after_forward", "true", change, mesh, "half again as many bytes on the wire"
    if config.stage == 3 and config.keep_last:
        yield "keep_last", "0", variant(config, keep_last=0), mesh, "the last units are gathered again in backward"
    if config.secondary_shard_size is not None:
        change, sizes = variant(config, secondary_shard_size=None), MeshSizes(mesh.shard, mesh.replicate)
        yield "secondary_shard_size", "null", change, sizes, "gathers of backward leave the node"
    if mesh.replicate > 1 and config.stage > 0 and config.shard_optimizer_over is OptimizerOver.SHARD:
        change = variant(config, shard_optimizer_over="all")
        yield "shard_optimizer_over", "all", change, mesh, "no more bytes on the wire"
    if mesh.replicate > 1 and config.stage > 0:
        yield "shard_size", "null", variant(config, shard_size=None), sharded, "gathers leave the node"
    if mesh.shard > 1 and config.stage > 0 and not config.optimizer_in_backward:
        change = variant(config, optimizer_in_backward=True)
        yield "optimizer_in_backward", "true", change, mesh, "no clipping of gradients; of no use with accumulation"


def offloads(model: nn.Module, config: ShardConfig, mesh: MeshSizes) -> list[Change]:
    """Return what leaving the GPU would save there, the cheapest first."""
    if config.stage == 0 or config.offload.params is not Tier.NONE:
        return []
    now = runtime_memory(model, config, mesh).peak
    both = "offload", "{optimizer: cpu, params: cpu}", {"optimizer": "cpu", "params": "cpu"}
    ways: list[tuple[str, str, dict[str, str]]] = [both] if config.stage == 3 else []
    if config.offload.optimizer is Tier.NONE:
        ways.insert(0, ("offload.optimizer", "cpu", {"optimizer": "cpu"}))
    found = []
    for key, value, tiers in ways:
        moved = variant(config, offload=tiers)
        there = runtime_memory(model, moved, mesh) if moved is not None else None
        if there is not None and there.peak < now:
            price = f"the optimizer steps on the CPU, with {memory_text(there.host)} of host memory a rank"
            found.append(Change(key, value, now - there.peak, price))
    return found


def explain(
    model: nn.Module,
    config: ShardConfig,
    mesh: MeshSizes,
    *,
    allocated: int,
    missing: int,
    idle: int = 0,
    optimizer: str = "adamw",
    on_gpu: bool = False,
) -> str:
    """Say in a few lines what took `allocated` bytes, and the cheapest change that saves at least `missing`.

    What neither the runtime nor the optimizer holds is taken for activations. `idle` bytes are in pieces that torch
    reserved and that were too small each.
    """
    memory = runtime_memory(model, config, mesh, OPTIMIZERS[optimizer])
    activations = max(0, allocated - memory.peak)
    parts = {**{name: size for name, size in memory.parts.items() if size}, "activations and others": activations}
    listed = ", ".join(f"{name} {memory_text(size)}" for name, size in parts.items() if size)
    lines = [f"ourshard: about {memory_text(allocated)} were allocated on this rank: {listed}."]
    if 0 < missing <= idle:
        lines.append(
            "The cheapest change that would fit: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment; "
            f"torch reserved {memory_text(idle)} more, in pieces of which none was large enough."
        )
    else:
        lines.append(_cheapest(model, config, mesh, activations=activations, missing=missing, on_gpu=on_gpu))
    lines.append("`ourshard plan` compares all configurations for a batch and a length, without a GPU.")
    return "\n".join(lines)


def _cheapest(
    model: nn.Module, config: ShardConfig, mesh: MeshSizes, *, activations: int, missing: int, on_gpu: bool
) -> str:
    """Name the first change that saves `missing` bytes: of sharding, then recomputation, then what leaves a GPU."""
    found = changes(model, config, mesh)
    text = _first_enough(found, missing)
    recomputed = variant(config, activation_checkpointing=True) if not config.activation_checkpointing else None
    if text is None and recomputed is not None and activations > missing:
        text = "The cheapest change that would fit: activation_checkpointing: true (a third more compute)."
    if text is None and on_gpu:
        moved = offloads(model, config, mesh)
        text, found = _first_enough(moved, missing), [*found, *moved]
    inputs = variant(config, offload={"activations": "cpu"}) if config.offload.activations is Tier.NONE else None
    if text is None and inputs is not None and on_gpu and activations > missing:  # recomputed, or there is none
        text = (
            "What may fit: offload.activations: cpu (inputs of recomputed units wait on the host, and take as much of "
            "it as they do here)."
        )
    return text or _last_resort(found)


def _first_enough(found: Sequence[Change], missing: int) -> str | None:
    enough = next((change for change in found if change.saves >= missing), None)
    if enough is None:
        return None
    return (
        f"The cheapest change that would fit: {enough.key}: {enough.value} saves {memory_text(enough.saves)} "
        f"({enough.price})."
    )


def explain_host(model: nn.Module, config: ShardConfig, mesh: MeshSizes, *, missing: int) -> str:
    """Say what the runtime keeps in the host memory that ran out beside a GPU, and how to keep less of it there."""
    memory = runtime_memory(model, config, mesh)
    held = memory_text(memory.host)
    lines = [f"ourshard: host memory ran out; the runtime and the optimizer hold {held} of it on this rank."]
    if memory.host:
        found = list(_back_on_the_gpu(model, config, mesh, memory))
        lines.append(_first_enough(found, missing) or _last_resort(found))
        lines.append("A local disk can hold the optimizer: offload.optimizer: nvme, with offload.nvme_path.")
    elif config.offload.activations is Tier.NONE:
        lines.append("Look at the data, its workers, and how the model is loaded.")
    if config.offload.activations is not Tier.NONE:
        lines.append("Inputs of recomputed units are there too: offload.activations: none, or a smaller batch.")
    return "\n".join(lines)


def _back_on_the_gpu(model: nn.Module, config: ShardConfig, mesh: MeshSizes, now: Memory) -> Iterator[Change]:
    optimizer = config.offload.optimizer.value
    for key, tiers in (
        ("offload.params", {"optimizer": optimizer, "params": "none"}),
        ("offload.optimizer", {"optimizer": "none", "params": "none"}),
    ):
        changed = variant(config, offload=tiers)
        less = runtime_memory(model, changed, mesh) if changed is not None else now
        if less.host < now.host:
            price = f"{memory_text(max(0, less.peak - now.peak))} more on the GPU"
            yield Change(key, "none", now.host - less.host, price)


def _last_resort(found: Sequence[Change]) -> str:
    together = "; ".join(f"{change.key}: {change.value} saves {memory_text(change.saves)}" for change in found)
    return f"No single change is enough ({together or 'none saves memory'}); use a smaller batch or more GPUs."


def missing_bytes(message: str) -> int:
    """Read the bytes that an allocation asked for from torch's message; 0 where it does not say."""
    return _bytes_in(message, r"[Tt]ried to allocate {}")


def idle_bytes(message: str) -> int:
    """Read the bytes that torch reserved and nobody has from its message; 0 where it does not say."""
    return _bytes_in(message, "{} is reserved by PyTorch but unallocated")


def _bytes_in(message: str, place: str) -> int:
    match = re.search(place.format(r"([\d.]+) (GiB|MiB|KiB|bytes)"), message)
    if match is None:
        return 0
    unit = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}[match.group(2)]
    return int(float(match.group(1)) * unit)


_ADVISED = "_has_advice"  # on an error that has some


def add_advice(error: BaseException, model: nn.Module) -> None:
    """Add an explanation to an out-of-memory error of a sharded model, once; its type stays, for who catches it.

    Before Python 3.11 exceptions have no notes: there the text is added to the message, behind what torch said.
    """
    from ourshard.runtime.api import engine_of

    engine, place = engine_of(model), exhausted(error)
    if engine is None or place is None or _ADVISED in vars(error):
        return
    mesh = MeshSizes(engine.mesh.shard.size, engine.mesh.replicate.size, engine.mesh.node.size)
    missing, on_gpu = missing_bytes(str(error)), engine.mesh.device.type == "cuda"
    if place is Place.HOST and on_gpu:
        note = explain_host(model, engine.config, mesh, missing=missing)
    else:
        idle = idle_bytes(str(error)) if on_gpu else 0
        taken = _most_allocated()
        note = explain(model, engine.config, mesh, allocated=taken, missing=missing, idle=idle, on_gpu=on_gpu)
    setattr(error, _ADVISED, True)
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)


def _most_allocated() -> int:
    """Return the most bytes that this process had: what led to the error may be gone by now."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
