"""Compare configurations of one model on one cluster: memory, traffic, time; find the cheapest that fits."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ourshard.config import Codec, OptimizerOver, ShardConfig, Tier, Transport
from ourshard.planning.formulas import OPTIMIZERS, Reach, checkpoint_nbytes
from ourshard.planning.hardware import Hardware
from ourshard.planning.layouts import PlannedModel, plan_model
from ourshard.planning.links import decide
from ourshard.planning.memory import Memory, memory_of
from ourshard.planning.model import Batch
from ourshard.planning.moves import MeshSizes, Move
from ourshard.planning.rehearsal import Rehearsal
from ourshard.planning.simulate import Timing, group_of, simulate
from ourshard.planning.trace import Trace, UnitParts, trace
from ourshard.planning.variants import variant
from ourshard.runtime.mesh import node_size
from ourshard.runtime.wording import counted

_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, apart from how it is sharded."""

    batch: Batch  # of one rank and one forward
    micro_batches: int = 1  # forwards in an optimizer step
    optimizer: str = "adamw"
    mixed_precision: str = "bf16"  # Accelerate's: no, fp16 or bf16
    clip: bool = True
    accelerate: bool = True  # under autocast, small parameters in their own dtype; False: `shard_model` alone

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"--optimizer: {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}.")
        if self.mixed_precision not in ("no", *_COMPUTE):
            raise ValueError(f"--mixed-precision: {self.mixed_precision!r} is not one of no, fp16, bf16.")
        if self.micro_batches < 1:
            raise ValueError(f"--accumulate: {self.micro_batches!r} must be 1 or more.")


@dataclass(frozen=True, slots=True)
class Row:
    """What one configuration costs."""

    config: ShardConfig
    memory: Memory
    timing: Timing
    seconds: tuple[float, float]  # of a step, best and worst
    tokens_per_second: float  # of all ranks
    wire_inside: int  # bytes that one rank sends to ranks of its node in a step
    wire_between: int  # bytes that one rank sends to other nodes in a step
    checkpoint: int  # bytes, of all ranks
    checkpoint_seconds: float
    fits: bool
    codecs: str = ""  # what was decided for `auto`, and why

    @property
    def name(self) -> str:
        """Say what sets this row apart."""
        return describe(self.config)


def describe(config: ShardConfig) -> str:
    """Return a few words for a configuration."""
    words = [f"stage {config.stage}"]
    if config.stage == 3 and not config.reshard_after_forward:
        words.append("kept whole for backward")
    if config.stage == 3 and config.keep_last:
        words.append(f"the last {config.keep_last:,} elements kept whole for backward")
    if config.shard_size is not None:
        words.append(f"in each {'node' if config.shard_size == 'node' else config.shard_size}")
    if config.shard_size is not None and config.shard_optimizer_over is OptimizerOver.ALL:
        words.append("optimizer over all")
    if config.secondary_shard_size is not None:
        words.append(f"second shard over {config.secondary_shard_size}")
    if config.activation_checkpointing:
        words.append("recomputed")
    if config.cuda_graph:
        words.append("replayed")
    if config.optimizer_in_backward:
        words.append("stepped in backward")
    coded = {"weights": config.communication.weights, "gradients": config.communication.gradients}
    words.extend(f"{codec.value} {name}" for name, codec in coded.items() if codec is not Codec.NONE)
    offload = config.offload
    places = {"inputs": offload.activations, "optimizer": offload.optimizer, "parameters": offload.params}
    words.extend(f"{name} on {tier.value}" for name, tier in places.items() if tier is not Tier.NONE)
    return ", ".join(words)


def candidates(base: ShardConfig, hardware: Hardware, kept: Collection[str] = ()) -> Iterator[ShardConfig]:
    """Yield what to compare: stages, recomputation; where there are several nodes, hybrid shard and a second shard.

    All have the values of `base` in the dotted keys of `kept`.
    """
    wanted = {key: getattr(base, key) for key in kept if key in VARIED}
    for config in _variants(base, hardware, "shard_size" in kept):
        if all(getattr(config, key) == value for key, value in wanted.items()):
            yield config


# The keys in which candidates differ.
VARIED = (
    "stage",
    "shard_size",
    "activation_checkpointing",
    "reshard_after_forward",
    "keep_last",
    "shard_optimizer_over",
    "secondary_shard_size",
)


def _variants(base: ShardConfig, hardware: Hardware, keeps_size: bool) -> Iterator[ShardConfig]:
    second = base.secondary_shard_size or (hardware.gpus_per_node if hardware.nodes > 1 else None)
    base = base.replace(secondary_shard_size=None)
    sizes: list[Any] = [None] if hardware.nodes == 1 or hardware.gpus_per_node == 1 else [None, "node"]
    sizes = [base.shard_size] if keeps_size else sizes
    for recompute in (False, True):
        for size in sizes:
            for stage in (0, 1, 2, 3):
                if (stage == 0 and size is not None) or not _goes_with(base, stage):
                    continue
                changes: dict[str, Any] = {"stage": stage, "shard_size": size, "activation_checkpointing": recompute}
                more: list[dict[str, Any]] = [{"reshard_after_forward": True}]
                if stage == 3:
                    more.append({"reshard_after_forward": False, "keep_last": 0})
                    if size is not None and base.shard_optimizer_over is OptimizerOver.SHARD:
                        more.append({"reshard_after_forward": True, "shard_optimizer_over": "all"})
                    ranks = mesh_of(base.replace(stage=3, shard_size=size), hardware).shard
                    if second is not None and 1 < second < ranks and ranks % second == 0:
                        more.append({"reshard_after_forward": True, "secondary_shard_size": second})
                for each in more:
                    config = variant(base, **changes, **each)
                    if config is not None:
                        yield config


def halved(base: ShardConfig, hardware: Hardware, kept: Collection[str] = ()) -> Iterator[ShardConfig]:
    """Yield hybrid shards inside of a node that is alone, each over half of its GPUs, where no size is asked for."""
    half = hardware.gpus // 2
    if hardware.nodes == 1 and half > 1 and hardware.gpus % 2 == 0 and "shard_size" not in kept:
        half_each = variant(base, shard_size=half)
        yield from candidates(half_each, hardware, {*kept, "shard_size"}) if half_each is not None else ()


def offloaded(base: ShardConfig, hardware: Hardware, kept: Collection[str] = ()) -> Iterator[ShardConfig]:
    """Yield what remains when none of `candidates` fits, or all is to be compared.

    Inputs of recomputed units on the host, or masters, then the parameters' shards, too, then all three; where `base`
    has a folder on a disk, masters there, then the parameters' shards, too.
    """
    if base.offload.active or {"offload.optimizer", "offload.params"} & set(kept):
        return
    masters, parameters = {"optimizer": "cpu"}, {"optimizer": "cpu", "params": "cpu"}
    inputs = {"activations": "cpu"}
    if base.offload.activations is not Tier.NONE or "offload.activations" in kept:
        ways = [masters, parameters]
    else:
        ways = [inputs, masters, parameters, {**parameters, **inputs}]
    if base.offload.nvme_path is not None:
        ways += [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}]
    for tiers in ways:
        more = {"activation_checkpointing": True} if "activations" in tiers else {}
        moved = variant(base, offload=tiers, **more)
        for config in candidates(moved, hardware, kept) if moved is not None else ():
            if config.reshard_after_forward or "reshard_after_forward" in kept:
                yield config


def _goes_with(base: ShardConfig, stage: int) -> bool:
    """Say whether a stage shards what `base` keeps on the host."""
    return stage == 3 or (base.offload.params is Tier.NONE and (stage > 0 or not base.offload.active))


@dataclass
class Planner:
    """Plans of one model and workload; what configurations have in common is computed once."""

    model: nn.Module  # on the meta device
    workload: Workload
    hardware: Hardware
    _traces: dict[tuple[Any, ...], Trace] = field(default_factory=dict)

    def rows(self, configs: Iterable[ShardConfig]) -> list[Row]:
        """Return one row for each configuration."""
        return [self.row(config) for config in configs]

    def row(self, config: ShardConfig) -> Row:
        """Predict what `config` costs.

        Raises:
            ValueError: the config does not fit the hardware (a shard size that does not divide the ranks).
        """
        config, codecs = decide(self._resolved(config), mesh_of(config, self.hardware), self.hardware)
        mesh = mesh_of(config, self.hardware)
        planned = plan_model(self.model, config, mesh, cast_small=not self.workload.accelerate, gpu=True)
        peer = self._uses_peer_copies(config, mesh)
        trace = self.trace(planned, config)
        moves = self._rehearse(planned, config, mesh, peer, trace)
        optimizer = OPTIMIZERS[self.workload.optimizer]
        memory = memory_of(planned, moves, optimizer, inputs=self.workload.batch.nbytes, offloaded=trace.on_host)
        memory = dataclasses.replace(memory, pinned=config.offload.pinned_of(memory.pinned))
        hardware = self.hardware
        if config.cuda_graph:
            hardware = hardware.replaying()
            memory = dataclasses.replace(memory, at_rest=memory.peak)  # graphs give nothing back between steps
        middle, best, worst = (
            simulate(moves, mesh, hardware, optimizer, reach, peer=peer)
            for reach in (Reach.MIDDLE, Reach.BEST, Reach.WORST)
        )
        tokens = self.workload.batch.tokens * self.workload.micro_batches * self.hardware.gpus
        store = sum(lane.used_numel * lane.store_nbytes for lane in planned.lanes)
        checkpoint = checkpoint_nbytes(store, optimizer)
        inside, between = traffic(moves, mesh, self.hardware)
        return Row(
            config=config,
            memory=memory,
            timing=middle,
            seconds=(best.total, worst.total),
            tokens_per_second=tokens / middle.total,
            wire_inside=inside,
            wire_between=between,
            checkpoint=checkpoint,
            checkpoint_seconds=checkpoint / self.hardware.nodes / self.hardware.disk_rate,
            fits=memory.peak <= self.hardware.memory and self.hardware.holds(memory.host),
            codecs=codecs,
        )

    def _resolved(self, config: ShardConfig) -> ShardConfig:
        """Follow Accelerate's mixed precision, as `prepare` does."""
        dtype = _COMPUTE.get(self.workload.mixed_precision)
        if config.precision.param_dtype is None and dtype:
            return config.replace(precision={"param_dtype": dtype})
        return config

    def _uses_peer_copies(self, config: ShardConfig, mesh: MeshSizes) -> bool:
        """Follow `make_peer_copies` in runtime/peer.py, on GPUs that reach each other's memory."""
        if config.communication.active or config.communication.transport is Transport.NCCL:
            return False
        return mesh.shard > 1 and self.hardware.nodes == 1

    def _rehearse(
        self, planned: PlannedModel, config: ShardConfig, mesh: MeshSizes, peer: bool, trace: Trace
    ) -> Sequence[Move]:
        steps, clip = self.workload.micro_batches, self.workload.clip
        return Rehearsal(planned, config, mesh, trace.visits, steps, clip, peer=peer).settled()

    def trace(self, planned: PlannedModel, config: ShardConfig) -> Trace:
        """Return the fake run for `config`; one serves all configurations that compute alike."""
        dtype = getattr(torch, config.precision.param_dtype or "float32")
        offloads = config.offload.activations is not Tier.NONE
        key = (config.wrap, config.activation_checkpointing, offloads, dtype, config.persist_below)
        if key not in self._traces:
            model = copy.deepcopy(self.model)
            _cast_parameters(model, dtype, config.persist_below if self.workload.accelerate else 0)
            units = _same_parts(planned.parts(), self.model, model)
            autocast = dtype if dtype.itemsize == 2 and self.workload.accelerate else None
            with _saying_what_ran(model, self.workload.batch):
                self._traces[key] = trace(
                    model,
                    units,
                    self.workload.batch.inputs,
                    autocast=autocast,
                    activation_checkpointing=config.activation_checkpointing,
                    offload_inputs=offloads,
                )
        return self._traces[key]


@contextmanager
def _saying_what_ran(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Turn what a model raises in its fake run into one line; it is a user's, and may need other inputs."""
    told = logging.getLogger("torch._subclasses.fake_tensor")  # prints the stack of what is told here in a line
    was_off, told.disabled = told.disabled, True
    try:
        yield
    except Exception as error:
        given = ", ".join(
            f"{name} of {'x'.join(map(str, value.shape))}" if isinstance(value, torch.Tensor) else name
            for name, value in batch.inputs.items()
        )
        text = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"model: {type(model).__name__} could not be trained for a step on {given} (--input NAME=SHAPE:DTYPE gives "
            f"it others): {type(error).__name__}: {text}"
        ) from error
    finally:
        told.disabled = was_off


def _same_parts(parts: Sequence[UnitParts], original: nn.Module, twin: nn.Module) -> list[UnitParts]:
    """Return the modules and parameters of `twin`, a copy, that `parts` names in `original`."""
    modules = {id(old): new for old, new in zip(original.modules(), twin.modules(), strict=True)}
    parameters = {id(old): new for old, new in zip(original.parameters(), twin.parameters(), strict=True)}
    return [
        UnitParts([modules[id(module)] for module in part.modules], [parameters[id(p)] for p in part.watched])
        for part in parts
    ]


def _cast_parameters(model: nn.Module, dtype: torch.dtype, persist_below: int) -> None:
    """Give parameters the dtype that they compute in; small ones keep theirs, as with Accelerate's mixed precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() >= persist_below and dtype.itemsize == 2:
            parameter.data = parameter.data.to(dtype)


def mesh_of(config: ShardConfig, hardware: Hardware) -> MeshSizes:
    """Return the mesh that `config` makes of the hardware's GPUs.

    Raises:
        ValueError: the shard size does not divide the ranks, or a secondary one those of a shard.
    """
    size = config.shard_size
    shard = hardware.gpus if size is None else hardware.gpus_per_node if size == "node" else int(size)
    if hardware.gpus % shard:
        raise ValueError(f"shard_size: {size!r} does not divide {counted(hardware.gpus, 'rank')}.")
    return MeshSizes(shard, hardware.gpus // shard, node_size(config, shard, hardware.gpus_per_node))


def traffic(moves: Sequence[Move], mesh: MeshSizes, hardware: Hardware) -> tuple[int, int]:
    """Return the bytes that one rank sends in a step: inside of its node, and (its share) to other nodes."""
    inside = between = 0
    for move in moves:
        for call in move.collectives:
            group = group_of(call.axis, mesh, hardware)
            sent = call.wire_nbytes(group.ranks)
            inside += sent if group.per_node > 1 else 0
            between += sent // group.per_node if group.nodes > 1 else 0
    return inside, between


SAME = 0.99  # rows whose speed is this close are taken for equal: the prediction is not that sharp


def cheapest(rows: Sequence[Row]) -> Row | None:
    """Return the row that fits and trains the most tokens a second; of equals, the one that needs the least memory."""
    fitting = [row for row in rows if row.fits]
    fastest = max((row.tokens_per_second for row in fitting), default=0.0)
    equals = [row for row in fitting if row.tokens_per_second >= SAME * fastest]
    return min(equals, key=lambda row: row.memory.peak, default=None)


def scaling(planner: Planner, config: ShardConfig, counts: Iterable[int]) -> Mapping[int, Row]:
    """Predict `config` on other numbers of GPUs, in nodes as the planner's hardware has them."""
    rows = {}
    for count in counts:
        node = min(count, planner.hardware.gpus_per_node)
        hardware = planner.hardware.replace(gpus=count, gpus_per_node=node)
        rows[count] = Planner(planner.model, planner.workload, hardware, planner._traces).row(config)
    return rows
