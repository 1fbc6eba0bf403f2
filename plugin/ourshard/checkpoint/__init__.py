"""Sharded and consolidated checkpoints, and the formats of others.

`detect(path)` opens any checkpoint; `convert`, `inspect` and `verify` do what the commands of these names do. They are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CheckpointError": "source",
    "detect": "source",
    "convert": "conversion",
    "inspect": "inspection",
    "verify": "verification",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
