"""ourshard: sharded data-parallel training under Accelerate and the Transformers Trainer.

Names are loaded on first use, so that `import ourshard` costs nothing in a process that does not train.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "ShardConfig": "ourshard.config",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ourshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
