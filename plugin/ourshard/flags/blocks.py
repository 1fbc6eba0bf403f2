"""The `optimizer` and `scheduler` blocks of a `ds_config.json`, as torch's own objects.

With DeepSpeed a script leaves both to the engine (Accelerate's `DummyOptim` and `DummyScheduler`, or a Trainer that
creates none); here they are built from the block.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ourshard.values import nearest

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

_DROPPED = ("fp32_optimizer_states",)  # how DeepSpeed's own class keeps its state
_CODED = (
    "it sends coded momenta, which nothing here does; write AdamW, and communication.gradients: int8 in "
    "ourshard_config to send less."
)
_OTHERS: Mapping[str, str] = {  # what to do instead of the optimizers that DeepSpeed brings along
    "onebitadam": _CODED,
    "zerooneadam": _CODED,
    "onebitlamb": _CODED,
    "deepspeedcpuadam": "write AdamW; offload.optimizer: cpu is what steps it on the host.",
    "fusedadam": "write AdamW.",
}


def build_optimizer(block: Mapping[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Build the optimizer of a block `{"type": ..., "params": {...}}` over `parameters` or parameter groups.

    As in DeepSpeed, `Adam` decouples weight decay (it is AdamW) unless `adam_w_mode` is false, and what the block does
    not say is as its own class has it, or torch's with `torch_adam`: they decay by 0 and by 0.01.

    Raises:
        ValueError: torch has no optimizer of that name, or it takes no such argument.
    """
    from torch import optim

    known = {name.lower(): name for name, cls in vars(optim).items() if inspect.isclass(cls) and name != "Optimizer"}
    settings = {key: value for key, value in dict(block.get("params") or {}).items() if key not in _DROPPED}
    name = str(block.get("type", "")).lower()
    if name == "adam" and settings.pop("adam_w_mode", True):
        name = "adamw"
    settings.pop("adam_w_mode", None)
    if name not in known:
        instead = _OTHERS.get(name) or f"build it in the script and leave the block out.{nearest(name, known)}"
        raise ValueError(f"optimizer.type: torch has no optimizer {block.get('type')!r}; {instead}")
    if not settings.pop("torch_adam", False) and name == "adamw":
        settings.setdefault("weight_decay", 0.0)
    cls = getattr(optim, known[name])
    _check_arguments(f"optimizer.params ({known[name]})", settings, cls)
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    result: torch.optim.Optimizer = cls(parameters, **{key: _number(value) for key, value in settings.items()})
    return result


def _check_arguments(where: str, settings: dict[str, Any], cls: type) -> None:
    """Drop settings that ask for torch's behaviour anyway, and refuse those that torch does not have."""
    if settings.get("bias_correction") is True:
        del settings["bias_correction"]
    if settings.get("max_grad_norm"):
        raise ValueError(f"{where}: max_grad_norm is not an optimizer's; write gradient_clipping beside the block.")
    settings.pop("max_grad_norm", None)
    names = [name for name in inspect.signature(cls).parameters if name not in ("params", "optimizer")]
    unknown = [key for key in settings if key not in names]
    if unknown:
        raise ValueError(f"{where}: unknown argument {unknown[0]!r}.{nearest(unknown[0], names)}")


def _number(value: Any) -> Any:
    """Read a number that JSON holds as text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def build_scheduler(block: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Build the scheduler of a block; step it once for each optimizer step.

    Raises:
        ValueError: the type is none of DeepSpeed's, or an argument is unknown or missing.
    """
    from torch.optim.lr_scheduler import LambdaLR

    from ourshard.flags import cycles

    known = {**_SCHEDULES, **cycles.SETTINGS}
    name = str(block.get("type", ""))
    if name not in known:
        raise ValueError(
            f"scheduler.type: {name!r} is not built here; use torch's scheduler in the script and leave the block out. "
            f"Known: {', '.join(known)}."
        )
    settings = {**known[name], **{key: _number(value) for key, value in dict(block.get("params") or {}).items()}}
    unknown = [key for key in settings if key not in known[name]]
    if unknown:
        raise ValueError(f"scheduler.params: unknown argument {unknown[0]!r}.{nearest(unknown[0], known[name])}")
    _check_schedule(name, settings)
    factors: list[Callable[[int], float]] = [_Factor(name, settings, group["lr"]) for group in optimizer.param_groups]
    return cycles.CycleLR(optimizer, factors, settings) if name == "OneCycle" else LambdaLR(optimizer, factors)


def _check_schedule(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where a setting that has no default is missing, or one is not of those that are known."""
    if settings.get("warmup_type", _RAMPS[0]) not in _RAMPS:
        raise ValueError(
            f"scheduler.params: warmup_type {settings['warmup_type']!r} is not known, and DeepSpeed would take it for "
            f"log; write one of {', '.join(_RAMPS)}."
        )
    if settings.get("total_num_steps", 0) is None:
        raise ValueError(f"scheduler.params: {name} needs total_num_steps, the number of optimizer steps.")
    for key in ("cycle_min_lr", "cycle_max_lr"):
        if settings.get(key, 0) is None:
            raise ValueError(f"scheduler.params: {name} needs {key}, a learning rate.")
    for key in ("lr_range_test_step_size", "cycle_first_step_size"):
        if settings.get(key, 1) <= 0:
            raise ValueError(f"scheduler.params: {key} is {settings[key]!r}; give a number of steps above 0.")


_RAMPS = ("log", "linear")
_SCHEDULES: Mapping[str, Mapping[str, Any]] = {  # the types, with DeepSpeed's defaults; None: no default
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "total_num_steps": None,
    },
    "WarmupCosineLR": {
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "total_num_steps": None,
        "cos_min_ratio": 0.0001,
    },
}


class _Factor:
    """The learning rate of one parameter group as a multiple of its `base`, by the number of steps taken.

    DeepSpeed's schedulers count from -1 and rest at the minimum until their first step; so step 1 here is their 0.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], base: float) -> None:
        self.name = name
        self.settings = settings
        self.base = base

    def __call__(self, steps: int) -> float:
        from ourshard.flags import cycles

        if self.name in cycles.RATES:
            return cycles.RATES[self.name](self.settings, steps) / self.base if self.base else 0.0
        done = max(0, steps - 1)
        warmup = max(2, int(self.settings["warmup_num_steps"]))
        if self.name == "WarmupCosineLR":
            return self._cosine(done, warmup) if steps else 0.0
        low, high = self.settings["warmup_min_lr"], self.settings["warmup_max_lr"]
        high = self.base if high is None else high
        return float(low + (high - low) * self._gamma(done, warmup)) / self.base if self.base else 0.0

    def _ramp(self, done: int, warmup: int) -> float:
        return done / warmup if self.settings["warmup_type"] == "linear" else math.log(done + 1) / math.log(warmup)

    def _gamma(self, done: int, warmup: int) -> float:
        if done < warmup:
            return self._ramp(done, warmup)
        if self.name == "WarmupLR":
            return 1.0
        total = int(self.settings["total_num_steps"])
        return max(0.0, (total - done) / max(1.0, total - warmup))

    def _cosine(self, done: int, warmup: int) -> float:
        if done < warmup:
            low = float(self.settings["warmup_min_ratio"])
            return low + (1.0 - low) * self._ramp(done, warmup)
        span = max(1, int(self.settings["total_num_steps"]) - warmup)
        progress = min(1.0, (done - warmup + 1) / span)
        low = float(self.settings["cos_min_ratio"])
        return low + (1.0 - low) * (1.0 + math.cos(math.pi * progress)) / 2.0
