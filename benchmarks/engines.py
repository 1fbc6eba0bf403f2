"""Each engine of the peer benchmark as one function: a model in, a step out.

A step takes token ids and returns the loss; it runs forward, backward, clipping at 1.0, AdamW, and zeroes gradients.
All engines compute in bf16 with fp32 masters unless their name says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from works import Work

Step = Callable[[torch.Tensor], torch.Tensor]
LR, CLIP = 1e-4, 1.0
DISK = os.environ.get("BENCH_DISK", "/tmp")  # a folder for the engines whose names end in _disk
RATIO = float(os.environ.get("BENCH_RATIO", "0.5"))  # of the optimizer that the engines whose names end in _part leave


@dataclass(slots=True)
class Phases:
    """CUDA events at the borders of the phases of a step; None on a CPU."""

    marks: list[Any]

    def mark(self) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, fused=torch.cuda.is_available())


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("model.layers").children())


def prepare(model: Any, work: Work) -> None:
    """Apply what the work asks of every engine alike: checkpointing and regional compilation."""
    if work.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if work.compile:
        for layer in layers_of(model):
            layer.compile()


def _plain_step(model: nn.Module, optimizer: Any, phases: Phases, clip: Callable[[], Any]) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        phases.mark()
        loss.backward()
        phases.mark()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def limit(model: nn.Module, work: Work, phases: Phases) -> Step:
    """No communication: bf16 weights on each GPU, the optimizer over this rank's share of every parameter."""
    model.to(torch.bfloat16)
    prepare(model, work)
    world = dist.get_world_size()
    parameters = list(model.parameters())
    parts = [p.detach().view(-1)[: p.numel() // world] for p in parameters]
    masters = [nn.Parameter(part.float()) for part in parts]
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = adamw(masters)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        phases.mark()
        loss.backward()
        phases.mark()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        grads = [p.grad.view(-1)[: p.numel() // world] for p in parameters if p.grad is not None]
        torch._foreach_copy_(gradients, grads)
        for p in parameters:
            p.grad = None
        optimizer.step()
        torch._foreach_copy_(parts, [m.detach() for m in masters])
        return loss

    return step


def ddp(model: nn.Module, work: Work, phases: Phases) -> Step:
    """torch DistributedDataParallel, fp32 weights under autocast."""
    prepare(model, work)
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True
    )
    optimizer = adamw(wrapped.parameters())

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(wrapped, ids)
        phases.mark()
        loss.backward()
        phases.mark()
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _fsdp2(reduce_dtype: torch.dtype, offload: bool = False) -> Callable[[nn.Module, Work, Phases], Step]:
    def build(model: nn.Module, work: Work, phases: Phases) -> Step:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        prepare(model, work)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        place = CPUOffloadPolicy() if offload else OffloadPolicy()
        for layer in layers_of(model):
            fully_shard(layer, mp_policy=policy, offload_policy=place)
        fully_shard(model, mp_policy=policy, offload_policy=place)
        optimizer = adamw(model.parameters())
        return _plain_step(
            model, optimizer, phases, lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        )

    return build


def fsdp1(model: nn.Module, work: Work, phases: Phases) -> Step:
    """torch FSDP1: FULL_SHARD, BACKWARD_PRE, forward prefetch, use_orig_params."""
    from functools import partial

    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    prepare(model, work)
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers_of(model)[0])})
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        use_orig_params=True,
        limit_all_gathers=True,
    )
    optimizer = adamw(wrapped.parameters())
    return _plain_step(wrapped, optimizer, phases, lambda: wrapped.clip_grad_norm_(CLIP))


def _deepspeed(
    stage: int, offload: str = "", params: str = "", quantized: bool = False
) -> Callable[[nn.Module, Work, Phases], Step]:
    """`offload`, `params`: "cpu" or "nvme"; it compiles its CPU Adam, and its reads and writes of a disk."""

    def build(model: nn.Module, work: Work, phases: Phases) -> Step:
        import deepspeed

        prepare(model, work)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": work.batch,
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        }
        if quantized:  # ZeRO++; its gradients are int4
            config["zero_optimization"] |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        for key, tier in (("offload_optimizer", offload), ("offload_param", params)):
            if tier:
                config["zero_optimization"][key] = {"device": tier, "pin_memory": True}
                config["zero_optimization"][key] |= {"nvme_path": DISK} if tier == "nvme" else {}
        if not offload:
            config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = loss_of(engine, ids)
            phases.mark()
            engine.backward(loss)
            phases.mark()
            engine.step()
            return loss

        return step

    return build


def megatron_fsdp(model: nn.Module, work: Work, phases: Phases) -> Step:
    """Megatron-FSDP: fully_shard_model, ZeRO-3, defaults."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    prepare(model, work)
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    # NCCL sets a communicator up at its first use, which would be in clipping: there one rank waited for the other,
    # which was still in its backward (two H200, Megatron-FSDP 0.6.1).
    for group in mesh.get_all_groups():
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    sharded = fully_shard_model(
        module=model.to(torch.bfloat16),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        zero_dp_strategy=3,
        fsdp_unit_modules=[type(layers_of(model)[0])],
        mixed_precision_policy=MixedPrecisionPolicy(),
    )
    optimizer = fully_shard_optimizer(adamw(sharded.parameters()))
    return _plain_step(sharded, optimizer, phases, lambda: nn.utils.clip_grad_norm_(sharded.parameters(), CLIP))


def rank_of_absent_world() -> Any:
    """Return the mesh of rank 0 in a world whose other ranks do not exist: torch's fake process group."""
    from ourshard.runtime.mesh import Axis, Mesh

    group, size = dist.group.WORLD, dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Mesh(
        Axis("shard", size, 0, group), Axis("replicate", 1, 0, None), Axis("world", size, 0, group), None, device
    )


def _ourshard(*, reduce: str = "float32", **options: Any) -> Callable[[nn.Module, Work, Phases], Step]:
    def build(model: nn.Module, work: Work, phases: Phases) -> Step:
        from ourshard.config import ShardConfig
        from ourshard.runtime.api import clip_grad_norm_, shard_model

        prepare(model, work)
        config = ShardConfig.from_dict(
            {
                **options,
                "precision": {"param_dtype": "bfloat16", "reduce_dtype": reduce},
                "ledger": bool(os.environ.get("LEDGER")),
            }
        )
        mesh = rank_of_absent_world() if dist.get_backend() == "fake" else None
        shard_model(model, config, mesh=mesh)
        optimizer = adamw(model.parameters())
        return _plain_step(model, optimizer, phases, lambda: clip_grad_norm_(model, CLIP))

    return build


ENGINES: dict[str, Callable[[nn.Module, Work, Phases], Step]] = {
    "limit": limit,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": _fsdp2(torch.float32),
    "fsdp2-bf16": _fsdp2(torch.bfloat16),
    "fsdp2_offload": _fsdp2(torch.float32, offload=True),
    "deepspeed1": _deepspeed(1),
    "deepspeed2": _deepspeed(2),
    "deepspeed3": _deepspeed(3),
    "deepspeed2_offload": _deepspeed(2, offload="cpu"),
    "deepspeed3_offload": _deepspeed(3, offload="cpu"),
    "deepspeed3_offload_all": _deepspeed(3, offload="cpu", params="cpu"),
    "deepspeed3_offload_disk": _deepspeed(3, offload="nvme"),
    "deepspeed3_quantized": _deepspeed(3, quantized=True),
    "megatron_fsdp": megatron_fsdp,
    "ourshard1": _ourshard(stage=1),
    "ourshard2": _ourshard(stage=2),
    "ourshard3": _ourshard(stage=3),
    "ourshard1-bf16": _ourshard(stage=1, reduce="bfloat16"),
    "ourshard2-bf16": _ourshard(stage=2, reduce="bfloat16"),
    "ourshard3-bf16": _ourshard(stage=3, reduce="bfloat16"),
    "ourshard3-nccl": _ourshard(stage=3, communication={"transport": "nccl"}),
    "ourshard1-nccl": _ourshard(stage=1, communication={"transport": "nccl"}),
    "ourshard3-nccl-bf16": _ourshard(stage=3, reduce="bfloat16", communication={"transport": "nccl"}),
    "ourshard3-nccl-keep": _ourshard(
        stage=3, reduce="bfloat16", reshard_after_forward=False, communication={"transport": "nccl"}
    ),
    "ourshard3-nccl-last": _ourshard(  # what DeepSpeed's `stage3_max_reuse_distance` keeps by default
        stage=3, reduce="bfloat16", keep_last=500_000_000, communication={"transport": "nccl"}
    ),
    "ourshard3-int8": _ourshard(stage=3, communication={"weights": "int8"}),
    "ourshard3-int8-int8": _ourshard(stage=3, communication={"weights": "int8", "gradients": "int8"}),
    "ourshard3-int8-int4": _ourshard(stage=3, communication={"weights": "int8", "gradients": "int4"}),
    "ourshard3-auto": _ourshard(stage=3, communication={"weights": "auto", "gradients": "auto"}),
    "ourshard1-int8": _ourshard(stage=1, communication={"gradients": "int8"}),
    "ourshard3-graph": _ourshard(stage=3, cuda_graph=True),
    "ourshard1-graph": _ourshard(stage=1, cuda_graph=True),
    "ourshard3-keep": _ourshard(stage=3, reshard_after_forward=False),
    "ourshard1_offload_optimizer": _ourshard(stage=1, offload={"optimizer": "cpu"}),
    "ourshard3_offload_optimizer": _ourshard(stage=3, offload={"optimizer": "cpu"}),
    "ourshard3_offload_all": _ourshard(stage=3, offload={"optimizer": "cpu", "params": "cpu"}),
    "ourshard3_offload_overlap": _ourshard(stage=3, offload={"optimizer": "cpu", "overlap_step": True}),
    "ourshard3_offload_all_overlap": _ourshard(
        stage=3, offload={"optimizer": "cpu", "params": "cpu", "overlap_step": True}
    ),
    "ourshard3_offload_params_disk": _ourshard(
        stage=3, offload={"optimizer": "cpu", "params": "nvme", "nvme_path": DISK, "overlap_step": True}
    ),
    "ourshard3_recomputed": _ourshard(stage=3, activation_checkpointing=True),
    "ourshard3_offload_inputs": _ourshard(stage=3, activation_checkpointing=True, offload={"activations": "cpu"}),
    "ourshard3_offload_half": _ourshard(stage=3, offload={"optimizer": "cpu", "optimizer_ratio": 0.5}),
    "ourshard3_offload_all_part": _ourshard(
        stage=3, offload={"optimizer": "cpu", "params": "cpu", "optimizer_ratio": RATIO}
    ),
    "ourshard3_offload_disk": _ourshard(stage=3, offload={"optimizer": "nvme", "nvme_path": DISK}),
    "ourshard-hybrid": _ourshard(stage=3, shard_size=2),
}

NEEDS = {"deepspeed": "deepspeed", "megatron": "megatron_fsdp"}  # engine prefix -> package
