"""Which plugin an `Accelerator` gets, out of its arguments, `enable` and the environment.

Two sources that say different things are refused, whichever they are; none overrides another in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import GradScalerKwargs

from ourshard.flags.deepspeed import blocks_of
from ourshard.flags.fsdp import from_fsdp
from ourshard.flags.objects import from_deepspeed_plugin, from_fsdp_plugin
from ourshard.flags.result import FlagResult, merge
from ourshard.flags.sources import from_environment
from ourshard.flags.translate import of_blocks
from ourshard.integrations import switch
from ourshard.integrations.notes import say_once
from ourshard.integrations.plugin import ShardPlugin

_FOREIGN = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins")
_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation_plugin")


def take_plugin(own: ShardPlugin | None, kwargs: dict[str, Any]) -> ShardPlugin:
    """Return the plugin to use, and take out of `kwargs` what stock accelerate must not see.

    The arguments of FSDP and DeepSpeed are read into our config; what they say about the run itself (precision,
    accumulation) is put into `kwargs` in accelerate's words, where nothing else says it.

    Raises:
        ValueError: two sources that disagree, or a plugin that cannot be read; the message names them.
    """
    own = _with_handlers(own, kwargs)
    foreign = {name: kwargs.pop(name) for name in _FOREIGN if kwargs.get(name) is not None}
    result = merge([_read_foreign(name, plugin) for name, plugin in foreign.items()] or _from_environment())
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)  # accelerate and transformers would set the other engine up
    _scale_losses(result.run.grad_scaler or switch.handed_on(switch.GRAD_SCALER), kwargs)
    explicit = own or switch.enabled_plugin()
    if explicit is not None and foreign:
        where = "ourshard_plugin" if own else "ourshard.enable()"
        raise ValueError(f"Accelerator: {where} and {', '.join(foreign)} are both given; give one of them.")
    blocks = blocks_of(getattr(foreign.get("deepspeed_plugin"), "deepspeed_config", None) or {})
    blocks = blocks or switch.handed_on(switch.BLOCKS)
    if explicit is not None:
        explicit.check_environment()
        explicit.blocks = blocks
        return explicit
    result = merge([result, from_environment()])
    _apply_run(result, kwargs)
    say_once([*result.notes, *(of_blocks(blocks) if foreign else ())])
    clipping = result.run.gradient_clipping or float(os.environ.get(switch.GRADIENT_CLIPPING, "0")) or None
    plugin = ShardPlugin(result.config, gradient_clipping=clipping)
    plugin.blocks = blocks
    return plugin


def _scale_losses(said: Mapping[str, Any], kwargs: dict[str, Any]) -> None:
    """Let accelerate scale fp16 losses as an `fp16` block says, where the script does not say how."""
    handlers = kwargs.get("kwargs_handlers") or []
    if not said:
        return
    if any(isinstance(handler, GradScalerKwargs) for handler in handlers):
        say_once(["fp16: the keys of the loss scale have no effect, because the script gives GradScalerKwargs."])
        return
    kwargs["kwargs_handlers"] = [*handlers, GradScalerKwargs(**said)]


def _with_handlers(own: ShardPlugin | None, kwargs: dict[str, Any]) -> ShardPlugin | None:
    handlers = list(kwargs.get("kwargs_handlers") or ())
    found = [handler for handler in handlers if isinstance(handler, ShardPlugin)]
    given = ([own] if own is not None else []) + found
    if len(given) > 1:
        raise ValueError(f"Accelerator: {len(given)} ShardPlugins are given; give one, and use its for_model().")
    if found:
        kwargs["kwargs_handlers"] = [handler for handler in handlers if handler is not found[0]]
    if own is not None and not isinstance(own, ShardPlugin):
        raise ValueError(f"Accelerator: ourshard_plugin is {own!r}; give ShardPlugin(config).")
    return given[0] if given else None


def _read_foreign(name: str, plugin: Any) -> FlagResult:
    if name == "fsdp_plugin":
        return from_fsdp_plugin(plugin)
    if isinstance(plugin, dict):
        raise ValueError(
            f"{name}: a dict of plugins, one a model, is refused; give one ShardPlugin and use its for_model(), which "
            "trains several models with one Accelerator."
        )
    return from_deepspeed_plugin(plugin)


def _from_environment() -> list[FlagResult]:
    """Read the variables by which other launchers ask for FSDP."""
    if switch.flag("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            f"ACCELERATE_USE_DEEPSPEED and {switch.SWITCH} are both set; unset the first, and give the DeepSpeed "
            f"config in the file of `accelerate launch`, or its values in {switch.CONFIG}."
        )
    if not switch.flag("ACCELERATE_USE_FSDP"):
        return []
    values = {name.lower(): value for name, value in os.environ.items() if name.startswith("FSDP_")}
    return [from_fsdp(values, "FSDP_* variables")]


def _apply_run(result: FlagResult, kwargs: dict[str, Any]) -> None:
    run = result.run
    if run.gradient_accumulation_steps is not None and not any(kwargs.get(name) for name in _ACCUMULATION):
        kwargs["gradient_accumulation_steps"] = run.gradient_accumulation_steps
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if run.mixed_precision and kwargs.get("mixed_precision") is None and exported == "no":
        kwargs["mixed_precision"] = run.mixed_precision
