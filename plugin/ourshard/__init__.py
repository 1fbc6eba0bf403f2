"""ourshard: sharded data-parallel training under Accelerate and the Transformers Trainer.

Names are loaded on first use, so that `import ourshard` costs nothing in a process that does not train. The import
puts the hooks into accelerate, if torch has not done so already (`TORCH_DEVICE_BACKEND_AUTOLOAD=0`).
"""

from __future__ import annotations

import importlib
from typing import Any

import _ourshard_autoload

__version__ = "0.1.0"

_EXPORTS = {
    "SaveWarning": "ourshard.checkpoint.background",
    "ShardCallback": "ourshard.integrations.trainer_callback",
    "ShardConfig": "ourshard.config",
    "ShardGradScaler": "ourshard.runtime.scaler",
    "ShardPlugin": "ourshard.integrations.plugin",
    "ShardTrainingArguments": "ourshard.integrations.trainer_arguments",
    "disable": "ourshard.integrations.switch",
    "enable": "ourshard.integrations.switch",
    "adopt_optimizer": "ourshard.runtime.api",
    "asked_to_end": "ourshard.integrations.stopping",
    "clip_grad_norm_": "ourshard.runtime.api",
    "clip_grad_value_": "ourshard.runtime.api",
    "engine_of": "ourshard.runtime.api",
    "full_state_dict": "ourshard.runtime.api",
    "gathered": "ourshard.runtime.api",
    "iter_full_parameters": "ourshard.integrations.exporting",
    "load_full_state_dict": "ourshard.runtime.api",
    "reset": "ourshard.runtime.api",
    "init_context": "ourshard.runtime.lazy_init",
    "load": "ourshard.checkpoint.running",
    "load_after_restart": "ourshard.integrations.restart",
    "save": "ourshard.checkpoint.running",
    "shard_model": "ourshard.runtime.api",
    "wait_for_save": "ourshard.checkpoint.background",
}

__all__ = ["__version__"]
__all__ += list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ourshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_ourshard_autoload.install()
