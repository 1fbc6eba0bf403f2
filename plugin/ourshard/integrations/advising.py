"""Advice on an out-of-memory error, where training meets one: in a forward, in a backward, in an optimizer's step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ourshard.planning.exhaustion import exhausted
from ourshard.runtime.engine import ENGINES, Engine

logger = logging.getLogger("ourshard")


def watch_forward(model: nn.Module) -> None:
    """Add advice to an out-of-memory error that leaves the forward of a model that was just sharded."""
    model.register_forward_hook(torch._dynamo.disable(_after_forward), always_call=True)


def _after_forward(module: nn.Module, args: Any, outputs: Any) -> None:
    error = sys.exc_info()[1]
    if outputs is None and error is not None and exhausted(error):  # called although the forward raised
        _advise(error, module)


@contextmanager
def advised(*, in_backward: bool = False) -> Iterator[None]:
    """Add advice to an out-of-memory error that leaves the block. A backward that failed is cleared away first."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        engines = list(ENGINES)
        if in_backward:
            for engine in engines:
                if engine.phase_is_backward:
                    engine.reset()
        models = [model for engine in sorted(engines, key=_numel) if (model := engine.model()) is not None]
        if models:
            _advise(error, models[-1])  # the largest
        raise


def _numel(engine: Engine) -> int:
    return sum(parameter.numel for lane in engine.lanes() for parameter in lane.parameters)


def _advise(error: BaseException, model: nn.Module) -> None:
    """Never raise: the error itself matters more than advice on it."""
    from ourshard.planning.advice import add_advice

    try:
        add_advice(error, model)
    except Exception as problem:
        logger.warning("There is no advice on the out-of-memory error: %s: %s", type(problem).__name__, problem)
