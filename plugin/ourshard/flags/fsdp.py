"""The flags of FSDP, versions 1 and 2, as Accelerate (`fsdp_config:`) and the Trainer (`fsdp_config=`) spell them.

`SHARD_GRAD_OP` becomes stage 3 with `reshard_after_forward: false`, not stage 2: FSDP shards its parameters at rest
under that name too, and only keeps them whole between forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ourshard.config import CheckpointFormat, ShardConfig, Tier
from ourshard.flags.language import Flag, Kind, Language, Outcome, idle, mapped, normalise, refused
from ourshard.flags.parallelism import PARALLELISM
from ourshard.flags.result import FlagResult, merge
from ourshard.values import flatten, nearest

STRATEGIES: Mapping[str, Mapping[str, Any]] = {  # in the order of torch's enum, whose numbers start at 1
    "FULL_SHARD": {"stage": 3, "reshard_after_forward": True},
    "SHARD_GRAD_OP": {"stage": 3, "reshard_after_forward": False},
    "NO_SHARD": {"stage": 0},
    "HYBRID_SHARD": {"stage": 3, "reshard_after_forward": True, "shard_size": "node"},
    "HYBRID_SHARD_ZERO2": {"stage": 3, "reshard_after_forward": False, "shard_size": "node"},
}
SIZE_BASED_DEFAULT = 100_000_000  # elements; what `accelerate launch` fills in for fsdp_min_num_params


def _strategy(value: str, key: str) -> Mapping[str, Any]:
    names = list(STRATEGIES)
    text = value.upper().rpartition(".")[2].lstrip("_")
    if text.isdigit() and 1 <= int(text) <= len(names):
        text = names[int(text) - 1]
    if text not in STRATEGIES:
        raise ValueError(f"{key}: {value!r} is not a sharding strategy.{nearest(text, names)}")
    return STRATEGIES[text]


def _read_strategy(value: str, _: Mapping[str, Any]) -> Outcome:
    return Outcome(_strategy(value, "sharding_strategy"))


def _read_reshard(value: str, said: Mapping[str, Any]) -> Outcome:
    if value.lower() in ("true", "false"):
        return Outcome({"stage": 3, "reshard_after_forward": value.lower() == "true"})
    if said.get("version") == 2 and value.isdigit() and int(value) > 1:
        return Outcome({"stage": 3, "reshard_after_forward": True, "secondary_shard_size": int(value)})
    return Outcome(_strategy(value, "reshard_after_forward"))


def _read_offload(value: bool, _: Mapping[str, Any]) -> Outcome:
    tier = "cpu" if value else "none"
    return Outcome({"offload.params": tier, "offload.optimizer": tier})


def _read_inputs(value: bool, _: Mapping[str, Any]) -> Outcome:
    return Outcome({"offload.activations": "cpu" if value else "none"})


def _policy(said: Mapping[str, Any]) -> str:
    text = str(said.get("auto_wrap_policy", "")).upper()
    if not text:
        return "SIZE_BASED_WRAP" if said.get("min_num_params") and not _classes(said) else "TRANSFORMER_BASED_WRAP"
    return text


def _classes(said: Mapping[str, Any]) -> list[str]:
    return list(said.get("transformer_layer_cls_to_wrap") or [])


def _read_policy(value: str, said: Mapping[str, Any]) -> Outcome:
    known = {
        "TRANSFORMER_BASED_WRAP": Outcome({} if _classes(said) else {"wrap.policy": "auto"}),
        "SIZE_BASED_WRAP": _read_min(said.get("min_num_params", SIZE_BASED_DEFAULT), said),
        "NO_WRAP": Outcome({"wrap.policy": "none"}),
    }
    if value.upper() not in known:
        raise ValueError(f"auto_wrap_policy: {value!r} is not known.{nearest(value.upper(), known)}")
    return known[value.upper()]


def _read_classes(value: list[str], said: Mapping[str, Any]) -> Outcome:
    if _policy(said) != "TRANSFORMER_BASED_WRAP":
        return Outcome(note=f"inactive: auto_wrap_policy is {_policy(said)}, as in FSDP.")
    return Outcome({"wrap.policy": "classes", "wrap.classes": value} if value else {})


def _read_min(value: int, said: Mapping[str, Any]) -> Outcome:
    if _policy(said) != "SIZE_BASED_WRAP":
        return Outcome(note=f"inactive: auto_wrap_policy is {_policy(said)}, as in FSDP." if value else "")
    if value == 0:
        return Outcome({"wrap.policy": "none"}, note="0 finds no units, so the whole model is one unit, as in FSDP.")
    return Outcome({"wrap.policy": "min_params", "wrap.min_params": value})


def _read_backward_prefetch(value: str, said: Mapping[str, Any]) -> Outcome:
    text = value.upper().rpartition(".")[2]
    known = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NO_PREFETCH": 0, "1": 1, "2": 0}
    if text not in known:
        raise ValueError(f"backward_prefetch: {value!r} is not known.{nearest(text, known)}")
    if said.get("version") == 2:
        return Outcome(note="inactive: FSDP2 ignores it and prefetches on its own, as prefetch.backward: 1 does.")
    return Outcome({"prefetch.backward": known[text]})


def _read_forward_prefetch(value: bool, _: Mapping[str, Any]) -> Outcome:
    if value:
        return Outcome({"prefetch.forward": 1})
    return Outcome(note="inactive: FSDP overlaps without it by running ahead; here prefetch.forward: 1 does that.")


def _read_state_dict_type(value: str, _: Mapping[str, Any]) -> Outcome:
    text = value.upper().rpartition(".")[2]
    known = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded", "1": "full", "3": "sharded"}
    if text in ("LOCAL_STATE_DICT", "2"):
        raise ValueError(
            "state_dict_type: LOCAL_STATE_DICT is refused: its flat shards load only on the same number of ranks; "
            "use SHARDED_STATE_DICT."
        )
    if text not in known:
        raise ValueError(f"state_dict_type: {value!r} is not known.{nearest(text, known)}")
    return Outcome({"checkpoint.format": known[text]})


def _read_ignored(value: Any, _: Mapping[str, Any]) -> Outcome:
    try:
        names = normalise(Kind.NAMES, value, "ignored_modules")
    except ValueError:
        raise ValueError("ignored_modules: a config can't hold module objects; give their dotted names.") from None
    patterns = [name for name in names if not re.fullmatch(r"[\w.]+", name)]
    if patterns:
        raise ValueError(
            f"ignored_modules: {patterns[0]!r} is a pattern, which is refused: a misspelt one would ignore nothing in "
            "silence; list the dotted names of the modules in wrap.ignore."
        )
    return Outcome({"wrap.ignore": names})


_PRECISIONS = {"fp8": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "no": "float32"}


def _read_mixed_precision(value: Any, said: Mapping[str, Any]) -> Outcome:
    if isinstance(value, str):
        name = _PRECISIONS.get(value, value)
        return Outcome({"precision.param_dtype": name, "precision.reduce_dtype": name})
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    casts = ("cast_forward_inputs", "cast_root_forward_inputs")
    given = value if isinstance(value, Mapping) else {name: getattr(value, name, None) for name in (*names, *casts)}
    unknown = [str(name) for name in given if name not in (*names, *casts)]
    if unknown:
        raise ValueError(f"mixed_precision_policy: unknown key {unknown[0]!r}.{nearest(unknown[0], (*names, *casts))}")
    of_root = casts[1] if given.get(casts[1]) is not None or said.get("version") == 1 else casts[0]
    dtypes = {f"precision.{name}": given.get(name) for name in names}
    kept = {"precision.cast_inputs": False} if given.get(of_root) is False else {}
    return Outcome({key: dtype for key, dtype in dtypes.items() if dtype is not None} | kept)


def _read_fsdp(value: Any, said: Mapping[str, Any]) -> Outcome:
    """Read `TrainingArguments.fsdp`: true, or the words of transformers 4 (`"full_shard auto_wrap offload"`)."""
    if isinstance(value, bool) or str(value).lower() in ("true", ""):
        return Outcome()
    if not isinstance(value, (str, list, tuple)):
        raise ValueError(f"fsdp: {value!r} is neither true nor words such as 'full_shard auto_wrap'.")
    values: dict[str, Any] = {}
    strategy = ""
    for word in value.split() if isinstance(value, str) else value:
        text = str(getattr(word, "value", word))
        if text == "offload":
            values |= _read_offload(True, said).values
        elif text == "auto_wrap":
            values |= {} if "auto_wrap_policy" in said else _read_policy("TRANSFORMER_BASED_WRAP", said).values
        else:
            if strategy and _strategy(text, "fsdp") != _strategy(strategy, "fsdp"):
                raise ValueError(f"fsdp: {strategy!r} and {text!r} are two sharding strategies; give one of them.")
            strategy = text
            values |= _strategy(text, "fsdp")
    return Outcome(values)


_XLA = "PyTorch/XLA has an FSDP of its own, which does not stand on torch.distributed; train with that one there."

FLAGS: tuple[Flag, ...] = (
    idle("version", "1 or 2 tells how the other keys are read; both versions end in the same engine.", Kind.INT,
         asks_nothing=(1, 2)),
    mapped("fsdp", "stage", "True turns FSDP on; the words of transformers 4 are read one by one.", Kind.ANY,
           read=_read_fsdp),
    mapped("sharding_strategy", "stage", "FULL_SHARD: stage 3. SHARD_GRAD_OP: stage 3, reshard_after_forward: false. "
           "NO_SHARD: stage 0. HYBRID_SHARD and HYBRID_SHARD_ZERO2: the same two with shard_size: node.", Kind.TEXT,
           read=_read_strategy),
    mapped("reshard_after_forward", "reshard_after_forward", "A bool keeps stage 3; a strategy name is read as "
           "sharding_strategy; a number above 1 in version 2 is secondary_shard_size.", Kind.TEXT, read=_read_reshard),
    mapped("offload_params", "offload.params", "FSDP keeps parameter shards, gradients and optimizer state on the "
           "host: offload.params and offload.optimizer become cpu.", read=_read_offload, aliases=("cpu_offload",)),
    mapped("auto_wrap_policy", "wrap.policy", "TRANSFORMER_BASED_WRAP: auto, or classes where given. SIZE_BASED_WRAP: "
           "min_params. NO_WRAP: none.", Kind.TEXT, read=_read_policy),
    mapped("transformer_layer_cls_to_wrap", "wrap.classes", "Used with TRANSFORMER_BASED_WRAP.", Kind.NAMES,
           read=_read_classes, aliases=("transformer_cls_names_to_wrap", "transformer_cls_to_wrap")),
    mapped("min_num_params", "wrap.min_params", "Used with SIZE_BASED_WRAP; 0 makes one unit.", Kind.INT,
           read=_read_min),
    mapped("backward_prefetch", "prefetch.backward", "BACKWARD_PRE: 1. BACKWARD_POST and NO_PREFETCH: 0, one unit "
           "whole at a time. Version 2 ignores it.", Kind.TEXT, read=_read_backward_prefetch,
           aliases=("backward_prefetch_policy",)),
    mapped("forward_prefetch", "prefetch.forward", "True: 1. False: stays at 1, which FSDP reaches by running ahead.",
           read=_read_forward_prefetch),
    mapped("state_dict_type", "checkpoint.format", "FULL_STATE_DICT: full. SHARDED_STATE_DICT: sharded. "
           "LOCAL_STATE_DICT is refused.", Kind.TEXT, read=_read_state_dict_type),
    mapped("cpu_ram_efficient_loading", "low_memory_loading", "Rank 0 reads the checkpoint, the others receive "
           "their shards."),
    mapped("activation_checkpointing", "activation_checkpointing", "Units are recomputed in backward."),
    mapped("activation_checkpointing_offload", "offload.activations", "True: cpu, with activation_checkpointing.",
           read=_read_inputs),
    mapped("ignored_modules", "wrap.ignore", "Dotted names; patterns and module objects are refused.", Kind.ANY,
           read=_read_ignored),
    mapped("mixed_precision_policy", "precision.param_dtype", "A name, a mapping or torch's object: param_dtype, "
           "reduce_dtype, buffer_dtype, output_dtype, cast_forward_inputs (version 1: cast_root_forward_inputs).",
           Kind.ANY, read=_read_mixed_precision),
    idle("use_orig_params", "Parameters always keep their identity, names and shapes for the optimizer.",
         asks_nothing=()),
    idle("sync_module_states", "Rank 0's weights and buffers are always the ones that are sharded.", asks_nothing=()),
    idle("limit_all_gathers", "Units are gathered into a fixed number of slots, so gathers in flight are always "
         "limited.", asks_nothing=()),
    idle("state_dict_config", "Whole state dicts are gathered to the host of rank 0; shards need no setting."),
    idle("optim_state_dict_config", "Follows checkpoint.format."),
    refused("param_init_fn", "a function can't be kept in a config; build the model on real tensors, or with "
            "low_memory_loading on rank 0 only.", Kind.ANY),
    refused("xla", _XLA),
    refused("xla_fsdp_v2", _XLA),
    refused("xla_fsdp_grad_ckpt", _XLA),
    refused("xla_fsdp_settings", _XLA, Kind.ANY, tree=True),
)  # fmt: skip

FSDP = Language("FSDP", FLAGS, prefix="fsdp_")


def from_fsdp(
    raw: Mapping[str, Any], source: str = "fsdp_config", parallelism: Mapping[str, Any] | None = None
) -> FlagResult:
    """Read an `fsdp_config`, with or without the `fsdp_` prefix, and Accelerate's `parallelism_config` beside it.

    Raises:
        ValueError: an unknown key, a refused value, or two keys that contradict each other.
    """
    policy = raw.get("mixed_precision_policy")
    flat = {key: value for key, value in raw.items() if key != "xla_fsdp_settings" or value}
    if isinstance(policy, Mapping):
        flat["mixed_precision_policy"] = dict(policy)
    results = [FSDP.read(flat, source)]
    if parallelism:
        results.append(PARALLELISM.read(parallelism, "parallelism_config"))
    return merge(results)


def to_fsdp(config: ShardConfig, ranks: int | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write `config` as the `fsdp_config` of an Accelerate YAML; the notes say what FSDP has no word for.

    Version 2 is written, except for what only version 1 can say (stage 0, copies in nodes, no prefetch in backward).
    The inputs of recomputed units go to the host in version 2 alone, and copies over so many ranks are said beside it,
    in `to_parallelism(config, ranks)`.
    """
    beside = to_parallelism(config, ranks)
    early = config.stage == 0 or (config.shard_size is not None and not beside)
    late = bool(beside) or config.offload.activations is not Tier.NONE
    first = early or not (config.prefetch.backward or late)
    raw: dict[str, Any] = {"fsdp_version": 1 if first else 2}
    if first:  # `accelerate launch` reads no other key for it in version 1
        raw["fsdp_sharding_strategy"] = _strategy_name(config)
    else:
        raw["fsdp_reshard_after_forward"] = _keeps_nothing_whole(config)
    raw["fsdp_offload_params"] = config.offload.params.value != "none"
    raw |= _wrap_flags(config)
    if first:
        raw["fsdp_backward_prefetch"] = "BACKWARD_PRE" if config.prefetch.backward else "NO_PREFETCH"
        raw["fsdp_forward_prefetch"] = config.prefetch.forward > 0
        raw["fsdp_use_orig_params"] = True
        raw["fsdp_sync_module_states"] = True
    if config.checkpoint.format is not CheckpointFormat.AUTO:
        raw["fsdp_state_dict_type"] = f"{config.checkpoint.format.value.upper()}_STATE_DICT"
    raw["fsdp_cpu_ram_efficient_loading"] = config.low_memory_loading
    raw["fsdp_activation_checkpointing"] = config.activation_checkpointing
    if config.offload.activations is not Tier.NONE and not first:
        raw["fsdp_activation_checkpointing_offload"] = True
    if config.wrap.ignore:
        raw["fsdp_ignored_modules"] = ",".join(config.wrap.ignore)
    return raw, unsayable(config, from_fsdp(raw, parallelism=beside).config, "FSDP")


def to_parallelism(config: ShardConfig, ranks: int | None) -> dict[str, Any]:
    """Return Accelerate's `parallelism_config` for sharded copies over so many ranks; empty where there are none."""
    size = config.shard_size
    if config.stage != 3 or not isinstance(size, int) or ranks is None or ranks <= size or ranks % size:
        return {}
    return {f"{PARALLELISM.prefix}dp_replicate_size": ranks // size, f"{PARALLELISM.prefix}dp_shard_size": size}


def _keeps_nothing_whole(config: ShardConfig) -> bool:
    return config.stage == 3 and config.reshard_after_forward


def _strategy_name(config: ShardConfig) -> str:
    if config.stage == 0:
        return "NO_SHARD"
    name = "FULL_SHARD" if _keeps_nothing_whole(config) else "SHARD_GRAD_OP"
    hybrid = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
    return hybrid[name] if config.shard_size == "node" else name


def _wrap_flags(config: ShardConfig) -> dict[str, Any]:
    policy = config.wrap.policy.value
    names = {"none": "NO_WRAP", "min_params": "SIZE_BASED_WRAP"}
    raw: dict[str, Any] = {"fsdp_auto_wrap_policy": names.get(policy, "TRANSFORMER_BASED_WRAP")}
    if policy == "classes":
        raw["fsdp_transformer_layer_cls_to_wrap"] = ",".join(config.wrap.classes)
    if policy == "min_params":
        raw["fsdp_min_num_params"] = config.wrap.min_params
    return raw


def unsayable(wanted: ShardConfig, said: ShardConfig, language: str) -> tuple[str, ...]:
    """Return a note for each key that reads back from `language` as something else."""
    back = flatten(said.to_dict())
    return tuple(
        f"{key}: {value!r} can't be said in {language}, which reads as {back[key]!r} here."
        for key, value in flatten(wanted.to_dict()).items()
        if back[key] != value
    )
