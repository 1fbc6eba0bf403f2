"""DeepSpeed's configuration: a `ds_config.json`, or the `deepspeed_config:` section of an Accelerate YAML.

Every `"auto"` is replaced by the Trainer's or Accelerate's value, or dropped so that ours decides; none is left over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ourshard.config import CommunicationConfig, ReduceOp, ShardConfig
from ourshard.flags.deepspeed_keys import DEEPSPEED_FLAGS, LAUNCHER, NEVER, ZERO
from ourshard.flags.files import load
from ourshard.flags.fsdp import unsayable
from ourshard.flags.language import Language, in_source, normalise
from ourshard.flags.result import FlagResult, RunSettings, merge
from ourshard.values import flatten

DEEPSPEED = Language("DeepSpeed", DEEPSPEED_FLAGS)

_STAGE = "zero_optimization.stage"
# In whose words a Trainer says what `"auto"` follows.
_FOLLOWED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps of TrainingArguments",
    "train_batch_size": "ranks x per_device_train_batch_size x gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 with adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay of TrainingArguments",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "the number of optimizer steps",
    "fp16.enabled": "fp16 of TrainingArguments",
    "bf16.enabled": "bf16 of TrainingArguments",
}
_COMMENTS = ("_", "//", "#")
_FILE_KEYS = ("deepspeed_config_file", "hf_ds_config")
_SECTION_KEYS = {spelling for flag in (*ZERO, *LAUNCHER) for spelling in flag.spellings if "." not in spelling}
_SECTION_DEFAULT_STAGE = 2  # Accelerate's, when `deepspeed_config:` names neither a stage nor a file


def from_deepspeed(
    raw: Mapping[str, Any] | str | Path, auto: Mapping[str, Any] | None = None, source: str = ""
) -> FlagResult:
    """Read a DeepSpeed configuration.

    `raw` is a mapping (a `ds_config.json`, or Accelerate's `deepspeed_config:`) or the path of a JSON file. `auto`
    holds what the Trainer or Accelerate says, by DeepSpeed's dotted keys, plus `world_size`; it fills every `"auto"`,
    and what is not `"auto"` has to agree with it.

    Raises:
        ValueError: an unknown key, a refused value, keys that contradict each other or the values in `auto`.
    """
    if not isinstance(raw, Mapping):
        source = source or str(raw)
        raw = load(raw)
    section = any(key in _SECTION_KEYS for key in raw)
    source = source or ("deepspeed_config" if section else "ds_config")
    known = dict(auto or {})
    world_size = known.pop("world_size", None)
    results = [_read({key: value for key, value in raw.items() if key not in _FILE_KEYS}, known, source)]
    for key in _FILE_KEYS:
        file = raw.get(key)
        if isinstance(file, Mapping):
            results.append(_read(file, known, f"{source}: {key}"))
        elif file not in (None, "", "none", "auto"):
            if not isinstance(file, (str, Path)):
                raise ValueError(f"{source}: {key}: expected the path of a JSON file, got {file!r}.")
            results.append(_read(load(file), known, str(file)))
    if not any("stage" in result.said for result in results):
        results.append(_default_stage(source, section and len(results) == 1))
    result = merge(results)
    _check_batch(result, world_size, source)
    return result


def blocks_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `optimizer` and `scheduler` blocks that stand in `raw` or in the file that it names, as written.

    Whoever builds them fills each `"auto"`: a Trainer, long after a launcher has read the file.
    """
    named = [raw[key] for key in _FILE_KEYS if raw.get(key) not in (None, "", "none", "auto")]
    places = [raw, *(file if isinstance(file, Mapping) else load(file) for file in named)]
    return {name: place[name] for place in places for name in ("optimizer", "scheduler") if place.get(name)}


def _read(raw: Mapping[str, Any], auto: Mapping[str, Any], source: str) -> FlagResult:
    try:
        resolved = _resolve_auto(_flat(raw), auto, source)
    except ValueError as error:
        raise ValueError(in_source(error, source)) from None
    return DEEPSPEED.read(resolved, source)


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys; those that begin as comments do (JSON has none) are left out, as DeepSpeed leaves them."""
    flat = flatten({key: value for key, value in raw.items() if not str(key).startswith(_COMMENTS)})
    if isinstance(flat.get("zero_optimization"), bool):  # the form of DeepSpeed's first versions
        flat[_STAGE] = int(flat.pop("zero_optimization"))
    return flat


def _default_stage(source: str, section: bool) -> FlagResult:
    stage, whose = (_SECTION_DEFAULT_STAGE, "Accelerate") if section else (0, "DeepSpeed")
    origin = f"{source}: no stage is given, {whose}'s default is {stage}"
    return FlagResult({"stage": stage}, {"stage": origin})


def _resolve_auto(flat: Mapping[str, Any], auto: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Replace or drop every `"auto"`, and check the other values against `auto`."""
    known = {DEEPSPEED.find(key).key if not DEEPSPEED.find(key).tree else key: value for key, value in auto.items()}
    resolved: dict[str, Any] = {}
    for spelling, value in flat.items():
        if DEEPSPEED.is_empty(spelling, value):
            continue
        flag = DEEPSPEED.find(spelling)
        key = spelling if flag.tree else flag.key
        if isinstance(value, str) and value.lower() == "auto":
            if known.get(key) is not None:
                resolved[spelling] = known[key]
            elif key == _STAGE:
                raise ValueError(f'{spelling}: "auto" has nobody to follow; write 0, 1, 2 or 3.')
            continue
        resolved[spelling] = value
        if known.get(key) is not None and value is not None:
            said, wanted = (normalise(flag.kind, item, spelling) for item in (value, known[key]))
            if not _same(said, wanted):
                raise ValueError(
                    f"{spelling}: {source} gives {said!r}, but {_FOLLOWED.get(key, 'the Trainer')} gives {wanted!r}. "
                    'Neither overrides the other: write "auto" in the first, which follows, or let both say the same.'
                )
    return resolved


def _same(one: Any, other: Any) -> bool:
    """Compare two values of a key: lists item by item, numbers that were written as text as numbers."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, str) != isinstance(other, str):
        try:
            return float(one) == float(other)
        except (TypeError, ValueError):
            return False
    return bool(one == other)


def _check_batch(result: FlagResult, world_size: int | None, source: str) -> None:
    run = result.run
    factors = (run.micro_batch_size, run.gradient_accumulation_steps, world_size)
    if run.train_batch_size is None or None in factors:
        return
    micro, steps, ranks = (int(factor) for factor in factors if factor is not None)
    if run.train_batch_size != micro * steps * ranks:
        from ourshard.runtime.wording import counted  # every process that imports accelerate reads this file

        raise ValueError(
            f"{source}: train_batch_size {run.train_batch_size} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {counted(ranks, 'rank')} = {micro * steps * ranks}; leave "
            "train_batch_size out, it follows from the others."
        )


def to_deepspeed(config: ShardConfig, run: RunSettings | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write `config` as a `ds_config.json`; the notes say what DeepSpeed has no word for.

    Batch sizes, accumulation and clipping are written as `run` has them, or as `"auto"`, as precision is, for the
    Trainer or Accelerate to fill.
    """
    run = run or RunSettings()
    raw: dict[str, Any] = {"zero_optimization": _zero(config)}
    raw |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    dtypes = {name: _SHORT.get(str(getattr(config.precision, name))) for name in ("param_dtype", "buffer_dtype")}
    if any(dtypes.values()):
        raw["data_types"] = {name: dtype for name, dtype in dtypes.items() if dtype}
    if config.precision.reduce_dtype in _SHORT:
        raw["communication_data_type"] = _SHORT[config.precision.reduce_dtype]
    if config.precision.master_dtype == "bfloat16":
        raw["bf16"] = {"enabled": "auto", "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if config.precision.master_dtype == "float16":
        raw["fp16"] = {"enabled": "auto", "fp16_master_weights_and_grads": True}
    if config.offload.activations.value != "none":
        raw["activation_checkpointing"] = {"cpu_checkpointing": True}
    if config.checkpoint.save_on_each_node:
        raw["checkpoint"] = {"use_node_local_storage": True}
    if config.communication.reduce_op is ReduceOp.SUM and config.stage < 3:  # where DeepSpeed takes it
        raw["gradient_allreduce_op"] = "sum"
    if config.ledger:
        raw["comms_logger"] = {"enabled": True}
    raw["fp16"] |= _scale(run.grad_scaler)
    sizes = {
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "gradient_clipping": run.gradient_clipping,
        "train_batch_size": run.train_batch_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
    }
    raw |= {key: "auto" if value is None else value for key, value in sizes.items()}
    raw |= {name: dict(block) for name, block in (("optimizer", run.optimizer), ("scheduler", run.scheduler)) if block}
    return raw, unsayable(config, from_deepspeed(raw).config, "DeepSpeed")


def _scale(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Write the arguments of torch's GradScaler as keys of an `fp16` block."""
    start, steps = scaler.get("init_scale"), scaler.get("growth_interval")
    if start is not None and (steps == NEVER or not math.log2(start).is_integer()):
        return {"loss_scale": start}
    power = {} if start is None else {"initial_scale_power": int(math.log2(start))}
    return {**power, **({} if steps is None else {"loss_scale_window": steps})}


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _zero(config: ShardConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.stage, "overlap_comm": True, "contiguous_gradients": True}
    offload = config.offload
    for name, tier in (("offload_optimizer", offload.optimizer.value), ("offload_param", offload.params.value)):
        if tier != "none":
            zero[name] = {"device": tier, "pin_memory": offload.pin_memory}
            zero[name] |= {"nvme_path": offload.nvme_path} if tier == "nvme" else {}
    if "offload_optimizer" in zero and offload.optimizer_ratio != 1.0:
        zero["offload_optimizer"]["ratio"] = offload.optimizer_ratio
    if config.stage == 3:
        zero["stage3_param_persistence_threshold"] = config.persist_below
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        zero["stage3_max_reuse_distance"] = 2 * config.keep_last
    if config.prefetch.forward == 0 and config.prefetch.backward == 0:
        zero["stage3_prefetch_bucket_size"] = 0
    if config.secondary_shard_size is not None:
        zero["zero_hpz_partition_size"] = config.secondary_shard_size
    if isinstance(config.shard_size, int) and config.stage == 3:
        zero["mics_shard_size"] = config.shard_size
    if config.stage == 3:  # where DeepSpeed reads them
        zero |= _said_of_communication(config.communication)
    return zero


def _said_of_communication(communication: CommunicationConfig) -> dict[str, Any]:
    said = {
        "mics_hierarchical_params_gather": communication.two_hop_gathers,
        "zero_quantized_weights": communication.weights.value == "int8",
        "zero_quantized_gradients": communication.gradients.value == "int4",
    }
    return {key: True for key, value in said.items() if value}
