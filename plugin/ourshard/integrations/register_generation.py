"""What is done to the continuous batching of transformers: the model is whole for as long as it runs.

A thread of each rank then runs as many forwards as the rank's own requests need, beside whatever else the rank does. No
rank may wait for the others there, so none is sharded meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

from ourshard.integrations.register_transformers import is_active


def continuous_batching(module: ModuleType) -> None:
    """Let `generate_batch`, and the context that it opens, gather a sharded model first. Collective then."""
    cls: Any = getattr(module, "ContinuousMixin", None)
    opened = getattr(cls, "continuous_batching_context_manager", None)
    if opened is None:
        return

    @functools.wraps(opened)
    @contextmanager
    def continuous_batching_context_manager(model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with _whole(model), opened(model, *args, **kwargs) as manager:
            yield manager

    cls.continuous_batching_context_manager = continuous_batching_context_manager


def _whole(model: Any) -> AbstractContextManager[Any]:
    """Return what gathers a model that rests in shards; at other stages its forwards wait for nobody."""
    if not is_active():
        return nullcontext()
    from ourshard.runtime.api import gathered
    from ourshard.runtime.part import engines_in

    sharded = any(unit.sharded for engine in engines_in(model) for unit in engine.units)
    return gathered(model) if sharded else nullcontext()
