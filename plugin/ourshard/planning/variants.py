"""Configs that differ from one in some keys, as far as there can be such."""

from __future__ import annotations

from typing import Any

from ourshard.config import ShardConfig


def variant(config: ShardConfig, **changes: Any) -> ShardConfig | None:
    """Return `config` with top-level fields changed, or None where the values can't go together."""
    try:
        return config.replace(**changes)
    except ValueError:
        return None
