"""Settings in the objects that Accelerate and transformers build: plugins and TrainingArguments.

Nothing here imports those packages: the objects are read by attribute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ourshard.flags.deepspeed import from_deepspeed
from ourshard.flags.files import from_json, load
from ourshard.flags.fsdp import from_fsdp
from ourshard.flags.result import FlagResult

_PLUGIN_FIELDS = (
    "fsdp_version",
    "sharding_strategy",
    "reshard_after_forward",
    "backward_prefetch",
    "mixed_precision_policy",
    "ignored_modules",
    "state_dict_type",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
    "transformer_cls_names_to_wrap",
    "min_num_params",
)


def fsdp_plugin_values(plugin: Any) -> dict[str, Any]:
    """Return what a `FullyShardedDataParallelPlugin` says, as an `fsdp_config`.

    The plugin fills its fields with defaults, so that a value equal to the plugin's default counts as not said.

    Raises:
        ValueError: a wrap policy that is a function of the user's, which can't be kept in a config.
    """
    values = {name: getattr(plugin, name, None) for name in _PLUGIN_FIELDS}
    values = {name: value for name, value in values.items() if value is not None and value is not False}
    strategy = getattr(values.get("sharding_strategy"), "name", values.get("sharding_strategy"))
    if strategy == "FULL_SHARD":
        del values["sharding_strategy"]
    if "sharding_strategy" in values or values.get("reshard_after_forward") is True:
        values.pop("reshard_after_forward", None)
    if getattr(plugin, "reshard_after_forward", None) is False:
        values["reshard_after_forward"] = False
    default_format = "FULL_STATE_DICT" if getattr(plugin, "fsdp_version", 1) != 2 else "SHARDED_STATE_DICT"
    if getattr(values.get("state_dict_type"), "name", "") == default_format:
        del values["state_dict_type"]
    if _offloads(getattr(plugin, "cpu_offload", None)):
        values["cpu_offload"] = True
    policy = _policy_name(getattr(plugin, "auto_wrap_policy", None))
    return values | ({"auto_wrap_policy": policy} if policy else {})


def _offloads(value: Any) -> bool:
    """Read a bool, FSDP1's `CPUOffload` or FSDP2's `CPUOffloadPolicy` (its base class means: no offload)."""
    return bool(getattr(value, "offload_params", value is True or type(value).__name__ == "CPUOffloadPolicy"))


def _policy_name(policy: str | Callable[..., Any] | None) -> str | None:
    if policy is None or isinstance(policy, str):
        return policy
    function = policy.func if isinstance(policy, functools.partial) else policy
    names = {
        "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
    }
    name = getattr(function, "__name__", repr(function))
    if name not in names:
        raise ValueError(
            f"auto_wrap_policy: the function {name!r} can't be kept in a config; name the classes in wrap.classes or "
            "the modules in wrap.modules."
        )
    return names[name]


def from_fsdp_plugin(plugin: Any, source: str = "fsdp_plugin") -> FlagResult:
    """Read a `FullyShardedDataParallelPlugin`."""
    return from_fsdp(fsdp_plugin_values(plugin), source)


def from_deepspeed_plugin(plugin: Any, auto: Mapping[str, Any] | None = None) -> FlagResult:
    """Read a `DeepSpeedPlugin`, whose fields and file Accelerate has joined in `deepspeed_config`."""
    return from_deepspeed(plugin.deepspeed_config, auto, "deepspeed_plugin")


def auto_from_training_arguments(args: Any, total_steps: int | None = None) -> dict[str, Any]:
    """Return what `TrainingArguments` says for DeepSpeed's `"auto"` keys.

    `total_steps` (optimizer steps) is known later than the arguments; without it the keys that need it are left out.
    """
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    values = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": args.world_size * micro * steps,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": args.fp16 or args.fp16_full_eval,
        "bf16.enabled": args.bf16 or args.bf16_full_eval,
        "world_size": args.world_size,
    }
    if total_steps is not None:
        values["scheduler.params.total_num_steps"] = total_steps
        values["scheduler.params.warmup_num_steps"] = args.get_warmup_steps(total_steps)
    return values


def from_training_arguments(args: Any, total_steps: int | None = None) -> FlagResult | None:
    """Read `fsdp`, `fsdp_config` or `deepspeed` of TrainingArguments; `None` when neither is set.

    Raises:
        ValueError: both are set, or what `from_fsdp` and `from_deepspeed` raise.
    """
    deepspeed, fsdp = getattr(args, "deepspeed", None), getattr(args, "fsdp", None)
    if deepspeed and fsdp:
        raise ValueError("TrainingArguments: fsdp and deepspeed are both set; ourshard reads one of them.")
    if deepspeed:
        auto = auto_from_training_arguments(args, total_steps)
        return from_deepspeed(_values(deepspeed, "deepspeed"), auto, "TrainingArguments.deepspeed")
    if not fsdp:
        return None
    values = _values(getattr(args, "fsdp_config", None) or {}, "fsdp_config")
    if not any(key.removeprefix("fsdp_") == "version" for key in values):
        values["version"] = 2  # the Trainer's default
    return from_fsdp({"fsdp": fsdp, **values}, "TrainingArguments.fsdp_config")


def _values(given: Mapping[str, Any] | str, field: str) -> dict[str, Any]:
    """Read a field of TrainingArguments as transformers does: a mapping, JSON, or the path of a JSON file."""
    if not isinstance(given, str):
        return dict(given)
    if not given.startswith("{"):
        return load(given)
    try:
        values: dict[str, Any] = from_json(given)
    except ValueError as error:
        raise ValueError(f"TrainingArguments.{field}: not JSON: {error}: {given[:100]!r}") from None
    return values
