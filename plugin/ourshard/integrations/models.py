"""Models on their way from a user's script to the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ourshard.config import ShardConfig
from ourshard.integrations.advising import watch_forward
from ourshard.runtime import api

_COMPUTE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def inner(model: nn.Module) -> nn.Module:
    """Return the module that holds the parameters: a compiled module is a shell around it."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def engine_of(model: Any) -> api.Engine | None:
    """Return the engine of a model that was prepared; None for everything else."""
    return api.engine_of(inner(model)) if isinstance(model, nn.Module) else None


def resolved(config: ShardConfig, accelerator: Any) -> ShardConfig:
    """Return `config` with what it leaves to accelerate: the compute dtype, and the sizes of `ParallelismConfig`."""
    if config.precision.param_dtype is None and accelerator.mixed_precision in _COMPUTE:
        config = config.replace(precision={"param_dtype": _COMPUTE[accelerator.mixed_precision]})
    sizes = accelerator.parallelism_config
    if sizes is None or sizes.dp_replicate_size == 1:
        return config
    if sizes.dp_shard_size == 1:
        return config.replace(stage=0)
    if config.shard_size not in (None, sizes.dp_shard_size):
        raise ValueError(
            f"shard_size: the ourshard config gives {config.shard_size!r}, but ParallelismConfig gives dp_shard_size "
            f"{sizes.dp_shard_size}. Neither overrides the other: remove one of the two."
        )
    return config.replace(shard_size=sizes.dp_shard_size)


def check_parallelism(sizes: Any) -> None:
    """Refuse what is not data parallelism.

    Raises:
        ValueError: tensor, context or sequence parallelism is asked for.
    """
    for name in ("tp_size", "cp_size", "sp_size"):
        size = getattr(sizes, name, 1) or 1
        if size > 1:
            raise ValueError(
                f"ParallelismConfig: {name} is {size}; ourshard shards data-parallel training only, leave it at 1."
            )


def shard_once(model: nn.Module, config: ShardConfig, accelerator: Any) -> None:
    """Shard `model` in place, unless it is sharded with this config already.

    Raises:
        ValueError: it is sharded with another config.
    """
    module = inner(model)
    engine = api.engine_of(module)
    if engine is None:
        # where accelerate's autocast casts for single operations, small parameters keep their own dtype, as in DDP
        api.shard_model(module, config, device=accelerator.device, cast_small=not accelerator.native_amp)
        engine = api.engine_of(module)
        if engine is not None and accelerator.ddp_handler is not None and not accelerator.ddp_handler.broadcast_buffers:
            engine.buffers.let_differ()
        _step_together_in_generate(module)
        _be_whole_in_generate(module)
        watch_forward(module)
        if engine is not None and accelerator.is_main_process:
            print(engine.summary(), file=sys.stderr, flush=True)
        return
    if engine.asked != config:
        raise ValueError(
            f"prepare: {type(module).__name__} is sharded already, and is now asked to be sharded differently: "
            f"{_differences(engine.asked, config)}. A model is sharded once; build it anew to shard it otherwise."
        )


def _step_together_in_generate(module: nn.Module) -> None:
    """Let `generate` of transformers go on until all ranks are done, where a forward is a collective."""
    engine = api.engine_of(module)
    if engine is not None and any(unit.sharded for unit in engine.units):
        for part in module.modules():
            part._is_fsdp_managed_module = True  # type: ignore[assignment]


def _be_whole_in_generate(module: nn.Module) -> None:
    """Let `generate` read what a model has beside its modules, as BLIP-2 its queries: no forward is around it."""
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if own and hasattr(part, "generate"):
            part.generate = partial(_generate, own, part.generate)  # type: ignore[assignment, arg-type]


def _generate(own: list[nn.Parameter], generate: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with api.gathered(own):
        return generate(*args, **kwargs)


def _differences(old: ShardConfig, new: ShardConfig) -> str:
    before, after = old.to_dict(), new.to_dict()
    return ", ".join(f"{key} {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key])
