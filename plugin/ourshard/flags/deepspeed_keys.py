"""The table of DeepSpeed's keys: those of a `ds_config.json`, and those of `deepspeed_config:` in an Accelerate YAML.

Collected from DeepSpeed 0.19.8 (its config models and constants), from its documentation for keys of earlier versions,
and from Accelerate 1.15. Keys stand without the `stage3_` prefix where DeepSpeed takes both spellings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ourshard.flags.language import Flag, Kind, Outcome, Reader, idle, mapped, refused
from ourshard.values import nearest

NEVER = 2**31 - 1  # steps after which a loss scale grows
_LARGEST_SCALE = 2.0**128  # torch's scaler holds it in fp32

BOOL, INT, FLOAT, TEXT, NAMES, ANY = Kind.BOOL, Kind.INT, Kind.FLOAT, Kind.TEXT, Kind.NAMES, Kind.ANY


_STAGE = "zero_optimization.stage"


def _at_stage_3(read: Reader) -> Reader:
    """Let a key count where DeepSpeed looks at it: below stage 3, if the stage is said beside it, it does not."""

    def reader(value: Any, said: Mapping[str, Any]) -> Outcome:
        outcome, stage = read(value, said), said.get(_STAGE, 3)
        if stage >= 3 or all(setting == "none" for setting in outcome.values.values()):
            return outcome
        return Outcome(note=f"inactive: DeepSpeed reads it at stage 3 alone, and the stage is {stage}.")

    return reader


def _set(target: str) -> Reader:
    return lambda value, _: Outcome({target: value})


def _when(values: Mapping[str, Any]) -> Reader:
    """Return a reader that says `values` when the flag is true, and nothing when it is false."""
    return lambda value, _: Outcome(values if value else {})


def _read_device(target: str) -> Reader:
    def read(value: str, said: Mapping[str, Any]) -> Outcome:
        known = ("none", "cpu", "nvme")
        if value.lower() not in known:
            raise ValueError(f"{target}: {value!r} is not a place to offload to.{nearest(value.lower(), known)}")
        return Outcome({target: value.lower()})

    return read


def _read_nvme_path(device: str) -> Reader:
    """Read a path that counts only where the device beside it is nvme (Accelerate writes `"none"` elsewhere)."""

    def read(value: str, said: Mapping[str, Any]) -> Outcome:
        if value.lower() == "none":
            return Outcome()
        if str(said.get(device, "none")).lower() != "nvme":
            return Outcome(note=f"inactive: {device} is not nvme.")
        return Outcome({"offload.nvme_path": value})

    return read


def _read_pin_memory(device: str) -> Reader:
    def read(value: bool, said: Mapping[str, Any]) -> Outcome:
        active = str(said.get(device, "none")).lower() != "none"
        return Outcome({"offload.pin_memory": value} if active else {})

    return read


def _read_prefetch(value: int, _: Mapping[str, Any]) -> Outcome:
    if value == 0:
        return Outcome({"prefetch.forward": 0, "prefetch.backward": 0})
    return Outcome(note="inactive: prefetch.forward and prefetch.backward count units, not elements; both stay at 1.")


def _read_reuse(value: int, _: Mapping[str, Any]) -> Outcome:
    return Outcome({"keep_last": max(0, value) // 2})


def _read_hpz(value: int, _: Mapping[str, Any]) -> Outcome:
    return Outcome({"secondary_shard_size": value} if value > 1 else {})


def _read_mics(value: int, _: Mapping[str, Any]) -> Outcome:
    return Outcome({"shard_size": value} if value > 0 else {})


def _read_loss_scale(value: float, _: Mapping[str, Any]) -> Outcome:
    if not 0 <= value < _LARGEST_SCALE:
        raise ValueError(f"fp16.loss_scale: {value!r} is no scale; give a number above 0, or 0 to let it follow.")
    if value == 0:
        return Outcome()
    return Outcome(
        {"run.grad_scaler.init_scale": value, "run.grad_scaler.growth_interval": NEVER},
        note="the scale starts there and does not grow; torch's scaler still halves it after an overflow.",
    )


def _read_scale_power(value: int, said: Mapping[str, Any]) -> Outcome:
    if not 0 <= value < math.log2(_LARGEST_SCALE):
        raise ValueError(f"fp16.initial_scale_power: {value!r} is not between 0 and 127, as a power of 2 in fp32 is.")
    static = float(said.get("fp16.loss_scale") or 0) > 0
    return Outcome({} if static else {"run.grad_scaler.init_scale": 2.0**value})


def _read_scale_window(value: int, said: Mapping[str, Any]) -> Outcome:
    if value < 1:
        raise ValueError(f"fp16.loss_scale_window: {value!r} is too small; give the number of steps, 1 or more.")
    static = float(said.get("fp16.loss_scale") or 0) > 0
    return Outcome({} if static else {"run.grad_scaler.growth_interval": value})


def _read_autocast(value: bool, said: Mapping[str, Any]) -> Outcome:
    return Outcome({"run.mixed_precision": "bf16"} if value and "torch_autocast.dtype" not in said else {})


def _read_autocast_dtype(value: str, said: Mapping[str, Any]) -> Outcome:
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
    name = value.removeprefix("torch.").lower()
    if not said.get("torch_autocast.enabled"):
        return Outcome()
    if name not in names:
        raise ValueError(f"torch_autocast.dtype: {value!r} is not known.{nearest(name, names)}")
    return Outcome({"run.mixed_precision": names[name]})


def _read_stage(value: int, _: Mapping[str, Any]) -> Outcome:
    return Outcome({"stage": value})


_BUCKETS = "Units are the buckets: each unit's lanes move in one collective, overlapped with compute."
_SLOTS = "A unit is released after use: prefetch.forward, prefetch.backward and keep_last say what is whole at a time."
_TILES = "The offload tiers size their own buffers from the lanes."
_LAUNCH = "Tells DeepSpeed's launcher where to start; use Accelerate's machine and process keys."
_SCALER = "torch's loss scaler has no such setting."
_SAVE = "save_model always writes consolidated weights; checkpoint.format tells what save_state writes."
_RESHARD = "Each checkpoint loads on any number of ranks."
_LEAVES = "A unit's parameters always move together, experts included."
_TRACKER = "Belongs to trackers: use Accelerator(log_with=...) or the Trainer's report_to."
_PROFILE = "Use ShardProfilerCallback for where the time goes, or the ledger for bytes and peaks."
_LOGS = "Logging follows Python's logging and the Trainer's log_level."
_RECOMPUTE = (
    "Tunes DeepSpeed's own checkpoint function, which Hugging Face models do not call; activation_checkpointing: true "
    "recomputes units."
)
_ANY_OPTIMIZER = "Any torch optimizer may step the masters."
_REMOVED = "DeepSpeed itself has removed it"

ZERO = (
    mapped("zero_optimization.stage", "stage", "The same stages.", INT, read=_read_stage, aliases=("zero_stage",)),
    mapped("zero_optimization.offload_optimizer.device", "offload.optimizer", "none, cpu or nvme.", TEXT,
           read=_read_device("offload.optimizer"), aliases=("offload_optimizer_device",)),
    mapped("zero_optimization.offload_optimizer.nvme_path", "offload.nvme_path", "Used when the device is nvme.", TEXT,
           read=_read_nvme_path("zero_optimization.offload_optimizer.device"),
           aliases=("offload_optimizer_nvme_path",)),
    mapped("zero_optimization.offload_optimizer.pin_memory", "offload.pin_memory", "Used when the device is not none.",
           read=_read_pin_memory("zero_optimization.offload_optimizer.device")),
    mapped("zero_optimization.offload_optimizer.ratio", "offload.optimizer_ratio", "The same ratio.", FLOAT),
    idle("zero_optimization.offload_optimizer.buffer_count", _TILES),
    idle("zero_optimization.offload_optimizer.pipeline_read", _TILES),
    idle("zero_optimization.offload_optimizer.pipeline_write", _TILES),
    idle("zero_optimization.offload_optimizer.pipeline", _TILES),
    idle("zero_optimization.offload_optimizer.fast_init", _TILES),
    idle("zero_optimization.offload_optimizer.cpuadam_cores_perc", "The host step uses torch's thread count."),
    refused("zero_optimization.offload_optimizer.super_offload", "it is made for one kind of machine (Grace Hopper); "
            "leave it out, offload.optimizer: cpu stays."),
    mapped("zero_optimization.offload_param.device", "offload.params", "none, cpu or nvme; stage 3 only.", TEXT,
           read=_at_stage_3(_read_device("offload.params")), aliases=("offload_param_device",)),
    mapped("zero_optimization.offload_param.nvme_path", "offload.nvme_path", "Used when the device is nvme; one path "
           "for both tiers.", TEXT, read=_at_stage_3(_read_nvme_path("zero_optimization.offload_param.device")),
           aliases=("offload_param_nvme_path",)),
    mapped("zero_optimization.offload_param.pin_memory", "offload.pin_memory", "Used when the device is not none.",
           read=_at_stage_3(_read_pin_memory("zero_optimization.offload_param.device"))),
    idle("zero_optimization.offload_param.buffer_count", _TILES),
    idle("zero_optimization.offload_param.buffer_size", _TILES),
    idle("zero_optimization.offload_param.max_in_cpu", _TILES),
    mapped("zero_optimization.cpu_offload", "offload.optimizer", "The old spelling of offload_optimizer: cpu.",
           read=_when({"offload.optimizer": "cpu"})),
    mapped("zero_optimization.cpu_offload_param", "offload.params", "The old spelling of offload_param: cpu.",
           read=_at_stage_3(_when({"offload.params": "cpu"})), aliases=("zero_optimization.cpu_offload_params",)),
    mapped("zero_optimization.cpu_offload_use_pin_memory", "offload.pin_memory", "The old spelling of pin_memory."),
    mapped("zero_optimization.param_persistence_threshold", "persist_below", "Elements; auto leaves ours, 1000.",
           INT, read=_at_stage_3(_set("persist_below")),
           aliases=("zero_optimization.stage3_param_persistence_threshold",)),
    mapped("zero_optimization.prefetch_bucket_size", "prefetch.forward", "0 turns prefetching off; other values are "
           "elements, which has no meaning here.", INT, read=_read_prefetch,
           aliases=("zero_optimization.stage3_prefetch_bucket_size",)),
    mapped("zero_optimization.zero_hpz_partition_size", "secondary_shard_size", "Above 1.", INT,
           read=_at_stage_3(_read_hpz)),
    mapped("zero_optimization.zero_quantized_weights", "communication.weights", "True: int8.",
           read=_at_stage_3(_when({"communication.weights": "int8"}))),
    mapped("zero_optimization.zero_quantized_gradients", "communication.gradients", "True: int4.",
           read=_at_stage_3(_when({"communication.gradients": "int4"}))),
    refused("zero_optimization.zero_quantized_nontrainable_weights", "frozen weights stay in their own dtype at rest; "
            "load the base model in 8 or 4 bits (bitsandbytes), or use zero_quantized_weights for the traffic."),
    mapped("zero_optimization.mics_shard_size", "shard_size", "Above 0.", INT, read=_at_stage_3(_read_mics)),
    mapped("zero_optimization.mics_hierarchical_params_gather", "communication.two_hop_gathers",
           "It has an effect where the ranks that share a copy are on several nodes.", BOOL,
           read=_at_stage_3(_when({"communication.two_hop_gathers": True}))),
    idle("zero_optimization.model_persistence_threshold", "persist_below alone tells what stays whole; the start-up "
         "summary prints how much that is.", aliases=("zero_optimization.stage3_model_persistence_threshold",)),
    idle("zero_optimization.max_live_parameters", _SLOTS, aliases=("zero_optimization.stage3_max_live_parameters",)),
    mapped("zero_optimization.max_reuse_distance", "keep_last", "Half of it: from the forward of a unit to its "
           "backward the elements behind it pass twice. Not given: 0, where DeepSpeed takes 1e9.", INT,
           read=_at_stage_3(_read_reuse), aliases=("zero_optimization.stage3_max_reuse_distance",)),
    idle("zero_optimization.sub_group_size", "The optimizer steps whole lanes; on disk the tier picks its tiles."),
    idle("zero_optimization.gather_16bit_weights_on_model_save", _SAVE, aliases=(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero3_save_16bit_model")),
    idle("zero_optimization.reduce_bucket_size", _BUCKETS),
    idle("zero_optimization.allgather_bucket_size", _BUCKETS),
    idle("zero_optimization.allgather_partitions", _BUCKETS),
    idle("zero_optimization.reduce_scatter", _BUCKETS),
    idle("zero_optimization.overlap_comm", _BUCKETS, asks_nothing=()),
    idle("zero_optimization.contiguous_gradients", _BUCKETS),
    idle("zero_optimization.use_multi_rank_bucket_allreduce", _BUCKETS),
    idle("zero_optimization.round_robin_gradients", "Gradients leave the device lane by lane on every rank at once."),
    idle("zero_optimization.parameter_alignment", "Shards are always aligned to 16 bytes."),
    idle("zero_optimization.module_granularity_threshold", _LEAVES,
         aliases=("zero_optimization.stage3_module_granularity_threshold",)),
    idle("zero_optimization.use_all_reduce_for_fetch_params", _BUCKETS,
         aliases=("zero_optimization.stage3_use_all_reduce_for_fetch_params",)),
    idle("zero_optimization.allgather_sequential", "Gathers are in place, without a copy into buckets.",
         aliases=("zero_optimization.stage3_allgather_sequential",)),
    idle("zero_optimization.leaf_module", _LEAVES, tree=True),
    idle("zero_optimization.compute_grad_norm", "The norm is computed when somebody clips or asks."),
    idle("zero_optimization.load_from_fp32_weights", "Checkpoints keep the masters."),
    idle("zero_optimization.elastic_checkpoint", _RESHARD),
    idle("zero_optimization.pipeline_loading_checkpoint", _RESHARD),
    idle("zero_optimization.ignore_unused_parameters", "Parameters without a gradient count as zero in the reduction "
         "and never stop a run.", asks_nothing=(True,)),
    idle("zero_optimization.legacy_stage1", "There is one engine for all stages."),
    idle("zero_optimization.memory_efficient_linear", "Modules are not replaced."),
    idle("zero_optimization.override_module_apply", "Modules are not replaced."),
    idle("zero_optimization.log_trace_cache_warnings", _LOGS),
    idle("zero_optimization.enable_sanity_checks", "The engine's invariants are always checked."),
    idle("zero_optimization.save_muon_momentum_buffer_in_memory", _TILES),
    refused("zero_optimization.zenflow", "updates that lag behind change the training; leave the block out and use "
            "offload.optimizer: cpu.", ANY, tree=True),
    idle("zero3_init_flag", "low_memory_loading does this: models are sharded when they are prepared, rank 0 loads."),
)  # fmt: skip

PRECISION = (
    mapped("bf16.enabled", "run.mixed_precision", "Accelerate's mixed_precision: bf16.",
           read=_when({"run.mixed_precision": "bf16"}), aliases=("bfloat16.enabled",)),
    mapped("bf16.bf16_master_weights_and_grads", "precision.master_dtype", "True: bfloat16 masters.",
           read=_when({"precision.master_dtype": "bfloat16"})),
    idle("bf16.bf16_optimizer_states", "Optimizer state follows precision.master_dtype."),
    idle("bf16.immediate_grad_update", "Gradients are reduced as soon as a lane is complete."),
    idle("bf16.check_grad_overflow", "bf16 steps are never skipped; ShardSentinelCallback watches for NaN and inf.",
         aliases=("bf16.check_overflow",)),
    *(idle(f"bf16.{key}", "bf16 has the range of fp32, so its loss is not scaled; earlier versions of DeepSpeed took "
           "this key of fp16 here too.")
      for key in ("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                  "min_loss_scale")),
    mapped("fp16.enabled", "run.mixed_precision", "Accelerate's mixed_precision: fp16.",
           read=_when({"run.mixed_precision": "fp16"})),
    mapped("fp16.loss_scale", "run.grad_scaler.init_scale", "0 is dynamic; another value is where the scale starts.",
           FLOAT, read=_read_loss_scale),
    mapped("fp16.initial_scale_power", "run.grad_scaler.init_scale", "2 to this power.", INT, read=_read_scale_power),
    mapped("fp16.loss_scale_window", "run.grad_scaler.growth_interval", "The same number of steps.", INT,
           read=_read_scale_window),
    idle("fp16.hysteresis", _SCALER),
    idle("fp16.consecutive_hysteresis", _SCALER),
    idle("fp16.min_loss_scale", _SCALER),
    idle("fp16.auto_cast", "Inputs are cast by Accelerate's mixed precision."),
    mapped("fp16.fp16_master_weights_and_grads", "precision.master_dtype", "True: float16 masters.",
           read=_when({"precision.master_dtype": "float16"})),
    mapped("torch_autocast.enabled", "run.mixed_precision", "Accelerate's mixed_precision is torch's autocast; bf16 "
           "unless torch_autocast.dtype says otherwise.", read=_read_autocast),
    mapped("torch_autocast.dtype", "run.mixed_precision", "Used when torch_autocast is enabled.", TEXT,
           read=_read_autocast_dtype),
    refused("torch_autocast.lower_precision_safe_modules", "torch's own list of operations decides; leave it out.",
            NAMES, asks_nothing=([],)),
    mapped("communication_data_type", "precision.reduce_dtype", "Gradients travel in it.", TEXT),
    mapped("data_types.param_dtype", "precision.param_dtype", "Forward and backward compute in it.", TEXT),
    mapped("data_types.buffer_dtype", "precision.buffer_dtype", "Floating-point buffers are cast to it.", TEXT),
    refused("data_types.grad_accum_dtype", "gradients accumulate in precision.master_dtype, which is float32 unless "
            "set; leave it out, or set bf16.bf16_master_weights_and_grads, which keeps masters and gradients in bf16.",
            TEXT, asks_nothing=("fp32", "float32")),
    refused("data_types.keep_in_fp32_modules", "buffers keep their own dtype unless precision.buffer_dtype casts them "
            "all; leave both out.", NAMES, asks_nothing=([],)),
    idle("seq_parallel_communication_data_type", "There is no sequence-parallel axis."),
    refused("amp", "apex is gone, and from DeepSpeed too; use bf16.enabled or fp16.enabled.", ANY, tree=True),
)  # fmt: skip

RUN = (
    refused("sequence_parallel_size", "only data-parallel training is sharded; leave it out.", INT,
            asks_nothing=(1,)),
    refused("tensor_parallel.autotp_size", "only data-parallel training is sharded; leave it out.", INT,
            asks_nothing=(0, 1)),
    mapped("gradient_accumulation_steps", "run.gradient_accumulation_steps", "Accelerate's and the Trainer's own "
           "setting.", INT),
    mapped("gradient_clipping", "run.gradient_clipping", "Each optimizer step of a loop clips to it, as in "
           "DeepSpeed; beside a Trainer it agrees with max_grad_norm.", FLOAT),
    mapped("train_batch_size", "run.train_batch_size", "Not needed; checked against the others when all are known.",
           INT),
    mapped("train_micro_batch_size_per_gpu", "run.micro_batch_size", "Not needed; checked against the Trainer's "
           "per_device_train_batch_size.", INT),
    mapped("optimizer.type", "run.optimizer.type", "A torch optimizer of that name.", TEXT),
    mapped("optimizer.params", "run.optimizer.params", "Its keyword arguments.", ANY, tree=True),
    idle("optimizer.legacy_fusion", _ANY_OPTIMIZER),
    mapped("scheduler.type", "run.scheduler.type", "WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest or "
           "OneCycle.", TEXT),
    mapped("scheduler.params", "run.scheduler.params", "Its keyword arguments.", ANY, tree=True),
    idle("managed_gradient_accumulation", "Accelerate's accumulate or the Trainer tells where a step ends."),
    idle("zero_allow_untested_optimizer", _ANY_OPTIMIZER),
    idle("zero_force_ds_cpu_optimizer", _ANY_OPTIMIZER),
    idle("is_train_batch_min", "No batch size is needed."),
    idle("prescale_gradients", "The division is split before and after the reduction, which is safe in fp16."),
    idle("gradient_predivide_factor", "The division is split before and after the reduction, which is safe in fp16."),
    mapped("gradient_allreduce_op", "communication.reduce_op", "mean or sum; at stage 3, too.", TEXT),
    refused("sparse_gradients", "gradients of embeddings are reduced dense; leave it out."),
    idle("disable_allgather", "The stage decides what is gathered."),
    idle("dataloader_drop_last", "Belongs to your DataLoader, or to the Trainer's dataloader_drop_last."),
    idle("vocabulary_size", "Only a warning of DeepSpeed's."),
    mapped("activation_checkpointing.cpu_checkpointing", "offload.activations", "True: cpu, and units are recomputed "
           "(activation_checkpointing: true), where DeepSpeed waits for its own function to be called.",
           read=_when({"activation_checkpointing": True, "offload.activations": "cpu"})),
    idle("activation_checkpointing", _RECOMPUTE, tree=True),
)  # fmt: skip

REPORTS = (
    idle("steps_per_print", _LOGS),
    idle("log_level", _LOGS),
    idle("dump_state", "ourshard config show prints the configuration."),
    idle("disable_python_gc", "Belongs to the training script (gc.disable)."),
    idle("wall_clock_breakdown", _PROFILE),
    idle("memory_breakdown", _PROFILE),
    idle("timers", _PROFILE, tree=True),
    idle("flops_profiler", _PROFILE, tree=True),
    mapped("comms_logger.enabled", "ledger", "The ledger counts bytes and calls of each collective.",
           read=_when({"ledger": True})),
    idle("comms_logger", "The ledger counts every collective.", tree=True),
    idle("tensorboard", _TRACKER, tree=True),
    idle("wandb", _TRACKER, tree=True),
    idle("csv_monitor", _TRACKER, tree=True),
    idle("comet", _TRACKER, tree=True),
    idle("monitor_config", f"DeepSpeed reads no such block. {_TRACKER}", tree=True),
    idle("comms_config", "DeepSpeed reads no such block; comms_logger is its name there, ledger here.", tree=True),
    idle("aio", _TILES, tree=True),
    idle("checkpoint.tag_validation", "Every rank's checkpoint folder is checked when the manifest is written."),
    idle("checkpoint.load_universal", _RESHARD),
    idle("checkpoint.parallel_write", "Every rank writes its own pieces.", tree=True),
    idle("checkpoint.checkpoint_serialization", "Checkpoints are safetensors files."),
    idle("checkpoint.writer", "Every rank writes its own pieces, without a writer to choose.", tree=True),
    mapped("checkpoint.use_node_local_storage", "checkpoint.save_on_each_node",
           "Each machine writes on a disk of its own."),
)  # fmt: skip

LAUNCHER = (
    idle("deepspeed_hostfile", _LAUNCH),
    idle("deepspeed_exclusion_filter", _LAUNCH),
    idle("deepspeed_inclusion_filter", _LAUNCH),
    idle("deepspeed_multinode_launcher", _LAUNCH),
    idle("deepspeed_moe_layer_cls_names", _LEAVES, aliases=("transformer_moe_cls_names",)),
    refused("enable_msamp", "fp8 through MS-AMP rewrites the optimizer; use bf16."),
    idle("msamp_opt_level", "Belongs to enable_msamp.", TEXT),
    refused("msamp", "fp8 through MS-AMP rewrites the optimizer; use bf16.", ANY, tree=True),
    idle("deepspeed_config_file", "The file is read, and joined with the keys beside it.", TEXT,
         aliases=("hf_ds_config",)),
)  # fmt: skip

_OTHER_PARALLELISM = "only data-parallel training is sharded; leave the block out."
_UNREAD = "DeepSpeed reads no such key"
# What is written into a ds_config.json by mistake, and what was meant.
MISPLACED = (
    refused("fp8", f"{_UNREAD}; set Accelerate's mixed_precision: fp8 and leave the block out.", ANY, tree=True),
    refused("max_grad_norm", f"{_UNREAD}; its name is gradient_clipping.", FLOAT, asks_nothing=(0,)),
    refused("gradient_checkpointing", f"{_UNREAD}; set gradient_checkpointing of TrainingArguments, or "
            "activation_checkpointing: true in ourshard_config."),
)  # fmt: skip

OTHER_FEATURES = tuple(
    refused(key, reason, ANY, tree=True)
    for key, reason in (
        ("tensor_parallel", _OTHER_PARALLELISM),
        ("expert_parallel", _OTHER_PARALLELISM),
        ("pipeline", _OTHER_PARALLELISM),
        ("sequence_parallel", _OTHER_PARALLELISM),
        ("use_data_before_expert_parallelism", _OTHER_PARALLELISM),
        ("hybrid_engine", "generation runs on the sharded model itself; leave the block out."),
        (
            "compile",
            "DeepCompile rewrites the graph around DeepSpeed's engine; leave the block out, and use Accelerate's "
            "dynamo_config, or torch_compile of TrainingArguments.",
        ),
        ("data_efficiency", "sampling belongs to the data loader; leave the block out."),
        ("curriculum_learning", "sampling belongs to the data loader; leave the block out."),
        ("progressive_layer_drop", "it changes the model's forward; do it in the model."),
        ("sparse_attention", "it changes the model's forward; choose an attention implementation in the model."),
        ("weight_quantization", "it is for inference; leave the block out."),
        ("compression_training", f"{_REMOVED}; quantize with torchao or peft."),
        ("quantize_training", f"{_REMOVED}; quantize with torchao or peft."),
        ("eigenvalue", f"{_REMOVED}; leave the block out."),
        ("elasticity", f"{_REMOVED}; restart on the ranks that are left, each checkpoint loads on any number."),
        ("autotuning", "`ourshard plan` compares configurations without running them; leave the block out."),
        ("nebula", f"{_REMOVED}; leave the block out."),
        ("datastates_ckpt", "checkpoints are written by every rank at once, in our own format; leave the block out."),
    )
)

DEEPSPEED_FLAGS: tuple[Flag, ...] = (*ZERO, *PRECISION, *RUN, *REPORTS, *LAUNCHER, *OTHER_FEATURES, *MISPLACED)
