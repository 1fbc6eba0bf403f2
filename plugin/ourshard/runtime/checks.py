"""What a model and a config have to be to be sharded: what can't work is refused here, by name, on all ranks."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ourshard import __version__
from ourshard.config import CheckpointFormat, Codec, ShardConfig, Transport
from ourshard.runtime.coded import weight_codec
from ourshard.runtime.coded_gradients import gradient_codec
from ourshard.runtime.control import waiting
from ourshard.runtime.engine import Engine
from ourshard.runtime.handle import ShardParameter
from ourshard.runtime.inventory import Parameter, UnitParameters, merge_numel, small_numel, take_stock
from ourshard.runtime.lazy import source_of
from ourshard.runtime.links import assumed
from ourshard.runtime.mesh import word_group
from ourshard.runtime.quantized import refuse_quantized
from ourshard.runtime.wording import counted, shorten
from ourshard.runtime.wrap import canonical
from ourshard.values import flatten

# What may differ between ranks, as machines do.
_OF_A_MACHINE = ("offload.nvme_path", "offload.pin_memory", "offload.max_pinned")


def compare_before_groups(config: ShardConfig) -> None:
    """Raise `ValueError` on all ranks where their configs differ, before process groups are made. Collective.

    Ranks that ask for different groups would wait for each other as long as they may.
    """
    if dist.get_world_size() == 1:
        return
    told: list[Any] = [None] * dist.get_world_size()
    with waiting("comparing the configs of all ranks"):
        dist.all_gather_object(told, _asked(config), group=word_group())
    _refuse_difference(told)


def _asked(config: ShardConfig) -> dict[str, Any]:
    """Return what all ranks need alike."""
    asked = {key: value for key, value in flatten(config.to_dict()).items() if key not in _OF_A_MACHINE}
    return asked | {"the version of ourshard": __version__, "the version of torch": torch.__version__.split("+")[0]}


def _refuse_difference(told: list[Any]) -> None:
    for rank, other in enumerate(told):
        for key, value in told[0].items():
            if other.get(key) != value:
                raise ValueError(
                    f"{key} is {value!r} on rank 0 and {other.get(key)!r} on rank {rank}; all ranks need the same: "
                    "look for a branch on the rank, and for files, variables and packages of one machine."
                )


def checked_stock(model: nn.Module, engine: Engine) -> list[UnitParameters]:
    """Return the units of a model that is about to be sharded, with their parameters. Collective.

    Raises `ValueError` on all ranks where one finds what can't work, rank 0 has no values, or their models differ.
    """
    _refuse_difference(engine.control.gather_objects(_asked(engine.config), "comparing configs"))
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
        config, mesh = engine.config, engine.mesh
        small = small_numel(config, mesh.shard.size, mesh.replicate.size)
        stock = take_stock(model, config.wrap, merge_numel(config, mesh.device), small)
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
            f"{counted(len(shared), 'parameter')} ({shorten(shared)}) belong to a model that is sharded already, as "
            "where an actor and a critic share a trunk. Put both models into one module, whose forward calls either, "
            "and prepare that; or shard with stage 0, where parameters may be shared."
        )


def _refuse_meta(model: nn.Module, stock: list[UnitParameters]) -> None:
    meta = [p.name for entry in stock for p in entry.parameters if p.tensor.is_meta]
    if meta:
        raise ValueError(
            f"{counted(len(meta), 'parameter')} on the meta device, without values ({shorten(meta)}). Rank 0 must have "
            "real weights: load them, or create the model without `torch.device('meta')`."
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
                "Tie them as one: register the same nn.Parameter in both places. One that shows the other transposed, "
                "as those of PEFT's ensure_weight_tying over embeddings in target_modules, must have memory of its own."
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
    """Say what rank 0 and another have of their own, or where their order differs."""
    if sorted(first) == sorted(other):
        here, there = next(pair for pair in zip(first, other, strict=True) if pair[0] != pair[1])
        return (
            f"Ranks hold different models: rank {rank} has {there} where rank 0 has {here}, and has that elsewhere. "
            "Make the modules in the same order on all ranks; look for a set that they are made from."
        )
    only_first = [text for text in first if text not in other][:1] or ["nothing more"]
    only_other = [text for text in other if text not in first][:1] or ["nothing more"]
    return f"Ranks hold different models: rank 0 has {only_first[0]}, rank {rank} has {only_other[0]}."


def _refuse_unsupported(engine: Engine) -> None:
    """Refuse, by name, what the config allows and this version of the runtime does not do."""
    config, device = engine.config, engine.mesh.device
    _refuse_tiers(engine)
    _refuse_codecs(config)
    if config.secondary_shard_size not in (None, engine.mesh.node.size):
        raise ValueError(
            f"secondary_shard_size: the mesh that was given has {counted(engine.mesh.node.size, 'rank')} in a node."
        )
    mesh, wanted = engine.mesh, config.communication.node_size
    if wanted not in (None, 1, mesh.shard.size, mesh.node.size):
        raise ValueError(
            f"communication.node_size: the mesh that was given has {counted(mesh.node.size, 'rank')} in a node."
        )
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
