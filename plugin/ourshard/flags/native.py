"""The native form as text: what each key means in one line, and a YAML writer that says so on every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

KEYS: Mapping[str, str] = {  # in the order of `ShardConfig`; a test compares them with its fields
    "stage": "0 DDP, 1 optimizer sharded, 2 gradients too, 3 parameters too",
    "reshard_after_forward": "stage 3: false keeps parameters whole between forward and backward",
    "keep_last": "stage 3: elements of the last units that stay whole between forward and backward",
    "shard_size": "ranks that share one sharded copy: a number or node; null is all ranks",
    "shard_optimizer_over": "shard, or all: masters and optimizer state over shard x replicate",
    "secondary_shard_size": "stage 3: neighbours that share a second shard, for all gathers of a step but the first",
    "persist_below": "parameters of fewer elements stay whole",
    "wrap.policy": "auto, classes, modules, min_params or none: how units are found",
    "wrap.classes": "module classes that are units",
    "wrap.modules": "dotted names of the modules that are units",
    "wrap.min_params": "least elements of a unit",
    "wrap.merge": "bytes up to which neighbouring small units are gathered as one; null is 64 MiB on GPUs",
    "wrap.ignore": "dotted names of modules that are left alone",
    "precision.param_dtype": "forward and backward compute in it; null follows mixed_precision",
    "precision.reduce_dtype": "gradients travel in it; null follows mixed_precision",
    "precision.master_dtype": "the optimizer updates parameters in it",
    "precision.buffer_dtype": "floating-point buffers are cast to it; null leaves them",
    "precision.output_dtype": "floating-point outputs of the model are cast to it; null leaves them",
    "precision.cast_inputs": "floating-point inputs of the model are cast to param_dtype, where autocast is off",
    "prefetch.forward": "units gathered ahead in forward",
    "prefetch.backward": "units gathered ahead in backward",
    "accumulate": "sharded, or deferred: whole gradients until the optimizer steps",
    "optimizer_in_backward": "step each unit as its gradients are reduced, and free them; without clipping or fp16",
    "offload.optimizer": "none, cpu or nvme: where masters and optimizer state live",
    "offload.params": "none, cpu or nvme: where parameter shards live (stage 3)",
    "offload.activations": "none or cpu: where inputs of recomputed units wait for backward (activation_checkpointing)",
    "offload.optimizer_ratio": "part of the optimizer elements that leave the device, 0 to 1",
    "offload.nvme_path": "folder on a local disk, for nvme",
    "offload.pin_memory": "page-locked host memory, for copies that overlap",
    "offload.max_pinned": "bytes that a rank pins, the rest is pageable; null: all that travels to the device",
    "offload.windows": "parts of pinned host memory through which lanes on a disk pass, 2 to 64",
    "offload.overlap_step": "the step on the host may go on while the next forward begins (optimizer: cpu, stage 3)",
    "communication.weights": "none, int8, fp8 or auto: how gathers are coded",
    "communication.gradients": "none, int8, int4 or auto: how reductions are coded",
    "communication.error_feedback": "carry the coding error of gradients to the next step",
    "communication.stochastic_rounding": "round gradients at random, without bias",
    "communication.seed": "of stochastic rounding",
    "communication.block": "elements that share one scale; by default 256, of int4 32",
    "communication.two_hop_gathers": "gather weights between nodes first, then inside of each",
    "communication.node_size": "ranks of a node, for what goes in two hops; null: as launched; 1: all in one hop",
    "communication.transport": "auto, nccl, or peer: what moves the bytes",
    "communication.reduce_op": "mean, or sum: what the gradients of all ranks become",
    "activation_checkpointing": "recompute units in backward",
    "cuda_graph": "replay forwards and backwards of static shapes as CUDA graphs",
    "low_memory_loading": "rank 0 reads the weights, the others receive their shards",
    "checkpoint.format": "sharded, or full: by rows or whole; auto: save_state by rows, a Trainer's checkpoint-N whole",
    "checkpoint.asynchronous": "write checkpoints in the background",
    "checkpoint.when_busy": "wait or skip: a save that finds the one before still being written",
    "checkpoint.save_dtype": "dtype of consolidated weights; null keeps each parameter's own",
    "checkpoint.keep": "newest checkpoints to keep; null keeps all",
    "checkpoint.frozen": "include, exclude: frozen weights in checkpoints by rows; auto: not under adapters of PEFT",
    "checkpoint.save_on_each_node": "each machine writes on a disk of its own",
    "timeout": "seconds a collective may wait; null is the process group's own",
    "ledger": "count bytes, calls and peaks",
}

SECTIONS: Mapping[str, str] = {
    "ourshard_config": "how the model is sharded",
    "wrap": "which modules are units",
    "precision": "dtypes",
    "prefetch": "how far gathers run ahead",
    "offload": "what leaves the device",
    "communication": "coded collectives",
    "checkpoint": "what is saved",
    "fsdp_config": "flags of FSDP",
    "deepspeed_config": "flags of DeepSpeed",
    "parallelism_config": "the mesh that FSDP2 shards over",
}

ACCELERATE: Mapping[str, str] = {
    "compute_environment": "where it runs",
    "debug": "check collectives for mismatched shapes",
    "distributed_type": "which backend shards the model",
    "downcast_bf16": "for TPUs",
    "dynamo_config": "torch.compile",
    "enable_cpu_affinity": "bind processes to the cores near their GPU",
    "fp8_config": "fp8 recipes",
    "gpu_ids": "which GPUs",
    "machine_rank": "0 on the first machine, 1 on the next",
    "main_process_ip": "address of the first machine",
    "main_process_port": "a free port of it",
    "main_training_function": "for TPUs and notebooks",
    "mixed_precision": "no, fp16, bf16 or fp8: the dtype that forward and backward compute in",
    "num_machines": "how many machines",
    "num_processes": "ranks over all machines, one for each GPU",
    "rdzv_backend": "static, or c10d to let machines find each other",
    "same_network": "whether the machines share a network",
    "tpu_env": "for TPUs",
    "tpu_use_cluster": "for TPUs",
    "tpu_use_sudo": "for TPUs",
    "use_cpu": "true to train on CPUs",
}


def comment_of(key: str) -> str:
    """Return the one-line meaning of a dotted key, a section, or a key of Accelerate's own."""
    return KEYS.get(key) or SECTIONS.get(key) or ACCELERATE.get(key) or "a key of Accelerate's own"


def dump(values: Mapping[str, Any], comments: Mapping[str, str] | None = None, head: str = "") -> str:
    """Write nested mappings as YAML with a comment on each line.

    `comments` replaces the meaning of single dotted keys (`"ourshard_config.stage"`); `head` is put on top as comment.
    """
    lines = list(_lines(values, "", 0, comments or {}))
    width = min(44, max((len(line) for line, _ in lines), default=0))
    body = [f"{line.ljust(width)}  # {text}" if text else line for line, text in lines]
    return "\n".join([*(f"# {line}" for line in head.splitlines()), *body]) + "\n"


def _lines(
    values: Mapping[str, Any], prefix: str, depth: int, comments: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        own = dotted.removeprefix("ourshard_config.")
        comment = comments.get(dotted) or comment_of(own)
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{key}:", comment
            yield from _lines(value, f"{dotted}.", depth + 1, comments)
        else:
            yield f"{'  ' * depth}{key}: {scalar(value)}", comment


def scalar(value: Any) -> str:
    """Write one value as YAML on one line."""
    plain = dict(value) if isinstance(value, Mapping) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
