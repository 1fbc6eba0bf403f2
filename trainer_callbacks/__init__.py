"""Trainer callbacks of ourshard, one a file; each is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "ShardCheckpointCallback": "ourshard.trainer_callbacks.checkpoint",
    "ShardEMACallback": "ourshard.trainer_callbacks.ema",
    "ShardMonitorCallback": "ourshard.trainer_callbacks.monitor",
    "ShardProfilerCallback": "ourshard.trainer_callbacks.profiler",
    "ShardSentinelCallback": "ourshard.trainer_callbacks.sentinel",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ourshard.trainer_callbacks' has no attribute {name!r}")
