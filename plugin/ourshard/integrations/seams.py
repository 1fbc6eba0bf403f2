"""What ourshard needs of accelerate, looked at before anything is patched.

Each seam is a name with the parameters that ourshard passes or takes. A version of accelerate that lacks one is left
alone: nothing is patched, and the first use of ourshard raises `message(...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

TRIED = "1.13 to 1.15"

# `accelerate.utils.launch`
LAUNCH = {"prepare_multi_gpu_env": ("args",), "prepare_simple_launcher_cmd_env": ("args",)}

# `accelerate.commands.launch`
COMMAND = {"deepspeed_launcher": ("args",), "multi_gpu_launcher": ("args",)}

# `accelerate.commands.config.config_args`
CONFIG = {"load_config_from_file": ("config_file",)}
CLUSTER_CONFIG: dict[str, tuple[str, ...]] = {"process_config": ("config_dict",), "to_dict": ("self",)}

# `accelerate.accelerator.Accelerator`
ACCELERATOR = {
    "__init__": (
        "cpu",
        "kwargs_handlers",
        "fsdp_plugin",
        "deepspeed_plugin",
        "deepspeed_plugins",
        "parallelism_config",
    ),
    "prepare_model": ("model", "device_placement", "evaluation_mode"),
    "prepare_optimizer": ("optimizer", "device_placement"),
    "backward": ("loss",),
    "no_sync": ("model",),
    "trigger_sync_in_backward": ("model",),
    "join_uneven_inputs": ("joinables", "even_batches"),
    "unscale_gradients": ("optimizer",),
    "clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
    "clip_grad_value_": ("parameters", "clip_value"),
    "get_state_dict": ("model", "unwrap"),
    "save_model": ("model", "save_directory"),
    "save_state": ("output_dir",),
    "load_state": ("input_dir",),
    "free_memory": ("objects",),
}
ACCELERATOR_PROPERTIES = ("multi_device", "use_distributed", "fp8_backend")


def of_launch(module: ModuleType) -> list[str]:
    """Return what is missing in `accelerate.utils.launch`, as text; empty when all is there."""
    return missing(module, LAUNCH)


def of_command(module: ModuleType) -> list[str]:
    """Return what is missing in `accelerate.commands.launch`."""
    return missing(module, COMMAND)


def of_config(module: ModuleType) -> list[str]:
    """Return what is missing in `accelerate.commands.config.config_args`."""
    found = missing(module, CONFIG)
    cluster = getattr(module, "ClusterConfig", None)
    if not isinstance(cluster, type) or not hasattr(cluster, "__dataclass_fields__"):
        return [*found, "ClusterConfig"]
    load = getattr(module, "load_config_from_file", None)
    load = inspect.unwrap(load) if callable(load) else None  # `register.py` may have wrapped it
    if isinstance(load, FunctionType) and "ClusterConfig" not in load.__code__.co_names:
        found.append("ClusterConfig in load_config_from_file")
    return found + missing(cluster, CLUSTER_CONFIG)


def of_state(module: ModuleType) -> list[str]:
    """Return what is missing in `accelerate.state`."""
    cls = getattr(module, "PartialState", None)
    return missing(cls, {"__init__": ("cpu",)}) if isinstance(cls, type) else ["PartialState"]


def of_accelerator(module: ModuleType) -> list[str]:
    """Return what is missing in `accelerate.accelerator`."""
    cls = getattr(module, "Accelerator", None)
    if not isinstance(cls, type):
        return ["Accelerator"]
    lost = [
        name for name in ACCELERATOR_PROPERTIES if not isinstance(inspect.getattr_static(cls, name, None), property)
    ]
    return missing(cls, ACCELERATOR) + [f"Accelerator.{name}" for name in lost]


def message(lost: list[str]) -> str:
    """Return the error for a version of accelerate whose seams moved."""
    return moved("accelerate", lost, tried=f"accelerate {TRIED}")


def moved(package: str, lost: list[str], tried: str) -> str:
    """Return the error for a version of `package` whose seams moved."""
    return (
        f"ourshard cannot work under {package} {metadata.version(package)}: {', '.join(lost)} is not where ourshard "
        f"takes hold of it. Tried: {tried}. Install one of these; or, to run without ourshard, take it out of the "
        "config or set OURSHARD_DISABLE=1."
    )


def missing(owner: Any, wanted: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return what `owner` lacks of the functions in `wanted`, and of their parameters."""
    prefix = f"{owner.__name__}." if isinstance(owner, type) else ""
    found = []
    for name, parameters in wanted.items():
        function = getattr(owner, name, None)
        if not callable(function):
            found.append(prefix + name)
            continue
        known = inspect.signature(function).parameters
        found += [f"{prefix}{name}({parameter}=)" for parameter in parameters if parameter not in known]
    return found
