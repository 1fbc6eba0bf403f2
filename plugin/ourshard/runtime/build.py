"""Build an engine: check the model on all ranks, plan lanes, fill them, take the parameters over.

Note [Where values come from]
A parameter whose values every rank can read by itself (`source.py`: its rows of a file, or random numbers drawn again)
is read so, and nothing is sent. All others come from rank 0, whatever the other ranks hold.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ourshard.config import CheckpointFormat, Codec, ShardConfig, Tier, Transport
from ourshard.runtime.attach import attach
from ourshard.runtime.buffer import give_back_unused
from ourshard.runtime.coded import can_code, weight_codec
from ourshard.runtime.coded_gradients import gradient_codec
from ourshard.runtime.disk import open_disk
from ourshard.runtime.divided import divides_masters, effective_stage
from ourshard.runtime.engine import Engine
from ourshard.runtime.handle import ShardParameter
from ourshard.runtime.host_room import check_host
from ourshard.runtime.in_backward import steps_in_backward
from ourshard.runtime.inventory import Parameter, UnitParameters, take_stock
from ourshard.runtime.lane import Lane
from ourshard.runtime.lane_key import LaneKey, master_dtype_of
from ourshard.runtime.layout import LaneLayout, LaneTensor, TensorSpec, UnitLayout, plan_unit
from ourshard.runtime.lazy import give_up_values, materialize, source_of
from ourshard.runtime.ledger import Ledger
from ourshard.runtime.links import assumed, choose_codecs
from ourshard.runtime.mesh import Mesh
from ourshard.runtime.peer import PeerCopies, make_peer_copies
from ourshard.runtime.placement import At, Placement, placement_of
from ourshard.runtime.quantized import refuse_quantized
from ourshard.runtime.recompute import recompute_in_backward
from ourshard.runtime.tiers import disk_need, host_need, with_tiers
from ourshard.runtime.unit import Unit
from ourshard.runtime.wrap import canonical


def build_engine(model: nn.Module, config: ShardConfig, mesh: Mesh, *, cast_small: bool) -> Engine:
    """Shard `model` in place and return its engine. Collective; raises `ValueError` on all ranks if one can't go on."""
    engine = Engine(model, config, mesh, cast_small=cast_small, ledger=Ledger() if config.ledger else None)
    stock = _checked_stock(model, engine)
    if Codec.AUTO in (config.communication.weights, config.communication.gradients):
        engine.chosen = choose_codecs(engine)
    layouts = with_tiers([plan_lanes(entry.parameters, engine) for entry in stock], config.offload)
    if config.offload.active:
        check_host(engine, model, host_need(layouts, config.offload, mesh.shard.size))
    if Tier.NVME in config.offload.tiers:
        engine.disk = open_disk(engine, disk_need(layouts, config.offload, mesh.shard.size))
    readable = _readable(stock, engine)
    for index, (entry, layout) in enumerate(zip(stock, layouts, strict=True)):
        unit = Unit(engine, index, entry.name, entry.modules, rooted=entry.rooted)
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
    return engine


def _find_peers(engine: Engine) -> None:
    """Move gathers and reductions to the copy engines, where the machine can. Collective."""
    wanted = engine.config.communication
    found: PeerCopies | str = "peers pull no messages of a codec, nor in two hops"
    if not wanted.active and engine.collectives.hops is None:
        found = make_peer_copies(engine.control, engine.mesh, engine.units, engine.ledger, wanted.transport.value)
    if isinstance(found, PeerCopies):
        engine.collectives.peer = engine.peer = found
    else:
        engine.without_peers = found


def plan_lanes(parameters: list[Parameter], engine: Engine) -> UnitLayout:
    """Lay the parameters of one unit out: sharded ones over the ranks that have parts, whole ones for one rank."""
    by_world: dict[int, list[int]] = defaultdict(list)
    keys = [_lane_key(parameter, engine) for parameter in parameters]
    for index, key in enumerate(keys):
        replicas = engine.mesh.replicate.size if key.placement.divided else 1
        by_world[1 if key.placement.whole else engine.mesh.shard.size * replicas].append(index)
    lanes: list[LaneLayout] = []
    for world, indices in sorted(by_world.items()):
        specs = [TensorSpec(parameters[i].name, parameters[i].shape, keys[i]) for i in indices]
        block = engine.config.communication.alignment
        for lane in plan_unit(specs, world, align=max(16, block), fine_granules=True).lanes:
            tensors = tuple(LaneTensor(indices[t.index], t.offset, t.numel, t.granule) for t in lane.tensors)
            lanes.append(LaneLayout(lane.key, tensors, lane.shard_numel, lane.world))
    return UnitLayout(tuple(lanes))


def _lane_key(parameter: Parameter, engine: Engine) -> LaneKey:
    trainable = parameter.tensor.requires_grad
    small = parameter.numel < engine.config.persist_below
    config, shards, replicas = engine.config, engine.mesh.shard.size, engine.mesh.replicate.size
    stage, over_all = effective_stage(config, shards, replicas), divides_masters(config, replicas)
    placement = placement_of(stage, small=small, trainable=trainable, over_all=over_all)
    compute = store = parameter.dtype
    if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1 and not parameter.packs_codes:
        if engine.param_dtype is not None and (engine.cast_small or not small):
            compute = engine.param_dtype
        if trainable:
            store = master_dtype_of(parameter.dtype, engine.master_dtype)
    coded = _is_coded(parameter, placement, compute, engine)
    return LaneKey(placement, store, compute, trainable, coded=coded)


def _is_coded(parameter: Parameter, placement: Placement, compute: torch.dtype, engine: Engine) -> bool:
    """Say whether gathers or reductions of a parameter travel coded: coded.py, coded_gradients.py."""
    communication = engine.config.communication
    gathers = communication.weights is not Codec.NONE and placement.params is At.SHARD
    reduces = communication.gradients is not Codec.NONE and parameter.tensor.requires_grad and not placement.whole
    several = engine.mesh.shard.size > 1 and not parameter.packs_codes
    return (gathers or reduces) and several and can_code(parameter.shape, compute)


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


def _checked_stock(model: nn.Module, engine: Engine) -> list[UnitParameters]:
    """Take stock of the model, and make sure that all ranks see the same and that rank 0 has values."""
    error, stock = None, []
    try:
        _refuse_unsupported(engine)
        if getattr(model, "_ourshard", None) is not None:
            raise ValueError("The model is sharded already: it was prepared before. Use the prepared model as it is.")
        inner = [name for name, module in model.named_modules() if getattr(module, "_ourshard", None) is not None]
        if inner:
            raise ValueError(f"{inner[0]!r} inside of the model is sharded already; shard the outer model only.")
        _refuse_lazy(model)
        refuse_quantized(model)
        _refuse_scripted(model)
        _refuse_own_optimizers(model)
        stock = take_stock(model, engine.config.wrap, _merge_numel(engine))
        _refuse_composed(stock)
        _refuse_shared(stock)
        _refuse_renormalisation(model, engine)
        _refuse_common_memory([parameter for entry in stock for parameter in entry.parameters])
        _refuse_meta(model, stock if engine.mesh.world.rank == 0 else [])
    except ValueError as problem:
        error = str(problem)
    engine.control.check(error, "checking the model")
    _check_same_model(model, stock, engine)
    return stock


_MERGE_NBYTES = 64 * 2**20


def _merge_numel(engine: Engine) -> int:
    """Return the elements up to which neighbouring units are gathered as one.

    On GPUs a collective of up to 16 MiB takes the same 55 to 85 us whatever its size (H200, NVLink), and each unit
    costs the host about 1 ms a step (48 units: 208 ms where the limit takes 153); on CPUs nothing is gained.
    """
    nbytes = engine.config.wrap.merge
    if nbytes is None:
        nbytes = _MERGE_NBYTES if engine.mesh.device.type == "cuda" else 0
    return nbytes // (engine.param_dtype or torch.float32).itemsize


def _refuse_composed(stock: list[UnitParameters]) -> None:
    """Refuse parameters that are several tensors behind one, as torchao's are: they have no rows to cut."""
    for parameter in (each for entry in stock for each in entry.parameters):
        if is_traceable_wrapper_subclass(parameter.tensor):
            raise ValueError(
                f"{parameter.name!r} is a {type(parameter.tensor).__name__}, several tensors behind one, which can't "
                "be cut into rows. Quantize with bitsandbytes, whose weights are plain bytes, or after training."
            )


def _refuse_shared(stock: list[UnitParameters]) -> None:
    """Refuse parameters that another model shards: each engine would gather them and reduce their gradients."""
    shared = [p.name for entry in stock for p in entry.parameters if isinstance(p.tensor, ShardParameter)]
    if shared:
        raise ValueError(
            f"{len(shared)} parameters ({', '.join(shared[:3])}, ...) belong to a model that is sharded already, as "
            "where an actor and a critic share a trunk. Put both models into one module, whose forward calls either, "
            "and prepare that; or shard with stage 0, where parameters may be shared."
        )


def _refuse_meta(model: nn.Module, stock: list[UnitParameters]) -> None:
    meta = [p.name for entry in stock for p in entry.parameters if p.tensor.is_meta]
    if meta:
        raise ValueError(
            f"{len(meta)} parameters are on the meta device and have no values ({', '.join(meta[:3])}, ...). Rank 0 "
            "must have real weights: load them, or create the model without `torch.device('meta')`."
        )
    lost = [f"{name}.{key}" for name, m in model.named_modules() for key, v in vars(m).items() if _is_meta(v)]
    if lost:
        raise ValueError(f"The tensor {lost[0]!r} is on the meta device and is not a registered buffer; register it.")


def _refuse_common_memory(parameters: list[Parameter]) -> None:
    """Refuse parameters that are tied by their memory: each would get memory of its own, and they would part."""
    spans = []
    for parameter in parameters:
        tensor = parameter.tensor
        if tensor.numel() and not tensor.is_meta and source_of(tensor) is None and tensor.layout is torch.strided:
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if span == tensor.numel():  # columns of one matrix leave gaps, and tie nothing
                start = tensor.data_ptr()
                spans.append((str(tensor.device), start, start + span * tensor.element_size(), parameter.name))
    spans.sort()
    for (device, _, stop, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < stop:
            raise ValueError(
                f"{name!r} and {other!r} are two parameters over the same memory; sharded, each would have its own. "
                "Tie them as one: register the same nn.Parameter in both places."
            )


def _refuse_renormalisation(model: nn.Module, engine: Engine) -> None:
    """Refuse embeddings whose forward writes to the weight, by the rows of this rank's batch."""
    several = engine.mesh.world.size > 1 or engine.param_dtype is not None
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None and several:
            raise ValueError(
                f"{name or 'the model'!r} is an {type(module).__name__} with max_norm={module.max_norm}: its forward "
                "shortens rows of the weight by the batch of one rank, so that ranks would differ, and the "
                "optimizer's copy would not change. Set max_norm to None and shorten rows after each step, inside of "
                "`with ourshard.gathered(module, writeback=True):`."
            )


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} has no shape yet (a lazy module): run one batch through the model before it is sharded."
            )


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse modules of TorchScript, whose parameters Python can't replace by whole ones for a forward."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ValueError(
                f"{name or 'the model'!r} is a {type(module).__name__} of torch.jit, whose parameters can't be "
                "sharded: use the module that it was made from. `torch.compile` works before and after `prepare`."
            )


def _refuse_own_optimizers(model: nn.Module) -> None:
    """Refuse parameters that torch's `_apply_optimizer_in_backward` steps, by this rank's gradient alone."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{name!r} has an optimizer of its own (_apply_optimizer_in_backward), which would step it by the "
                "gradient of one rank. Leave it out, prepare the optimizer, and set optimizer_in_backward: true."
            )


def _check_same_model(model: nn.Module, stock: list[UnitParameters], engine: Engine) -> None:
    seen = [f"{p.name} {p.shape} {p.dtype} {p.tensor.requires_grad}" for entry in stock for p in entry.parameters]
    seen += [f"buffer {canonical(name)} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    digest = hashlib.sha256("\n".join(seen).encode()).hexdigest()
    if len(set(engine.control.gather_objects(digest, "comparing models"))) == 1:
        return
    lists = engine.control.gather_objects(seen, "comparing parameters")
    assert isinstance(lists[0], list)
    for rank, other in enumerate(lists):
        assert isinstance(other, list)
        if other != lists[0]:
            raise ValueError(_difference(lists[0], other, rank))


def _difference(first: list[str], other: list[str], rank: int) -> str:
    """Say what rank 0 and another have of their own; where one has nothing more, the order differs."""
    only_first = [text for text in first if text not in other][:1] or ["nothing more"]
    only_other = [text for text in other if text not in first][:1] or ["nothing more"]
    return f"Ranks hold different models: rank 0 has {only_first[0]}, rank {rank} has {only_other[0]}."


def _refuse_unsupported(engine: Engine) -> None:
    """Refuse, by name, what the config allows and this version of the runtime does not do."""
    config, device = engine.config, engine.mesh.device
    _refuse_tiers(engine)
    _refuse_codecs(config)
    if config.secondary_shard_size not in (None, engine.mesh.node.size):
        raise ValueError(f"secondary_shard_size: the mesh that was given has {engine.mesh.node.size} ranks in a node.")
    mesh, wanted = engine.mesh, config.communication.node_size
    if wanted not in (None, 1, mesh.shard.size, mesh.node.size):
        raise ValueError(f"communication.node_size: the mesh that was given has {mesh.node.size} ranks in a node.")
    if config.checkpoint.asynchronous and config.checkpoint.format is CheckpointFormat.FULL:
        raise ValueError("checkpoint.asynchronous: format full is gathered and written at once; use sharded, or false.")
    if config.checkpoint.keep is not None and config.checkpoint.format is CheckpointFormat.FULL:
        raise ValueError("checkpoint.keep: checkpoints of format full are not counted; use sharded, or leave it out.")
    refuse_dtype(device, engine.param_dtype)


def refuse_dtype(device: torch.device, dtype: torch.dtype | None) -> None:
    """Refuse a dtype to compute in that the device can't do."""
    if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ValueError(f"precision.param_dtype: {device} can't compute in bfloat16; use float16 or float32.")


def _refuse_codecs(config: ShardConfig) -> None:
    if config.communication.gradients is not Codec.NONE and config.stage == 0:
        raise ValueError("communication.gradients: at stage 0 there are no shards to reduce into; use stage 1, 2 or 3.")
    if config.communication.gradients is not Codec.NONE and config.precision.reduce_dtype == "float64":
        raise ValueError("precision.reduce_dtype: float64 has no codec; use float32 with communication.gradients.")
    if config.communication.weights is not Codec.NONE and config.stage != 3:
        raise ValueError(
            f"communication.weights: {config.communication.weights.value} needs stage 3; at stage {config.stage} the "
            "gathered weights stay, and evaluation would see the rounded ones. Use none."
        )
    if config.communication.active and config.communication.transport is Transport.PEER:
        raise ValueError("communication.transport: peer copies move exact values; use auto or nccl with a codec.")
    if config.communication.two_hop_gathers and config.communication.transport is Transport.PEER:
        raise ValueError("communication.two_hop_gathers: peer copies are for the GPUs of one host; use auto or nccl.")
    tried = assumed(config, Codec.INT8, Codec.INT8).communication
    weight_codec(tried)  # checks the block
    gradient_codec(tried)


def _refuse_tiers(engine: Engine) -> None:
    offload = engine.config.offload
    if offload.active and engine.config.stage == 0:
        raise ValueError("offload.optimizer: at stage 0 masters are whole on every rank; use stage 1, 2 or 3.")
