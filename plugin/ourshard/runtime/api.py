"""What users call: shard a model, reach whole parameters, clip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ourshard.config import ShardConfig
from ourshard.runtime import state as _state
from ourshard.runtime.build import build_engine
from ourshard.runtime.checks import compare_before_groups
from ourshard.runtime.clip import clip_grad_norm_, clip_grad_value_
from ourshard.runtime.engine import ENGINES, Engine
from ourshard.runtime.mesh import Mesh, build_mesh
from ourshard.runtime.optim import adopt_optimizer

__all__ = [
    "Engine",
    "adopt_optimizer",
    "clip_grad_norm_",
    "clip_grad_value_",
    "engine_of",
    "full_state_dict",
    "gathered",
    "load_full_state_dict",
    "reset",
    "shard_model",
]

Model = TypeVar("Model", bound=nn.Module)


def shard_model(
    model: Model,
    config: ShardConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    *,
    device: torch.device | str | None = None,
    cast_small: bool = True,
) -> Model:
    """Shard `model` in place and return it.

    Collective: every rank calls it with a model of the same structure. Values come from rank 0; the other ranks may
    hold them on the meta device. Parameters keep their Python identity, so optimizers may be made before or after.
    `cast_small=False` leaves parameters below `persist_below` in their own dtype, for use under autocast.
    Raises `ValueError` on every rank when the model or the config can't work.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"shard_model: the model is a {type(model).__name__}; give one torch.nn.Module.")
    if config is None or isinstance(config, Mapping):
        config = ShardConfig.from_dict(config or {})
    if not isinstance(config, ShardConfig):
        raise ValueError(
            f"shard_model: config is {config!r}; give a ShardConfig, a mapping such as {{'stage': 3}}, or nothing."
        )
    built = build_mesh(config, mesh, torch.device(device) if device is not None else None, compare_before_groups)
    build_engine(model, config, built, cast_small=cast_small)
    return model


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model (compiled or not), or None."""
    model = getattr(model, "_orig_mod", model)
    engine = model.__dict__.get("_ourshard")
    return engine if isinstance(engine, Engine) else None


def sharded_engine(model: nn.Module) -> Engine:
    """Return the engine of a model. Raises `ValueError` where it has none."""
    engine = engine_of(model)
    if engine is None:
        raise ValueError(
            f"{type(model).__name__} is not sharded by ourshard; call `accelerator.prepare` or "
            "`ourshard.shard_model` first."
        )
    return engine


@contextmanager
def gathered(
    target: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    writeback: bool = False,
    modifier_rank: int | None = None,
) -> Iterator[Any]:
    """Make the parameters of a model, a module of it, or given parameters whole for the time of a `with` block.

    Collective: enter and leave on every rank. Inside, modules hold ordinary tensors in compute dtype. With a whole
    model inside, forwards do not communicate, so ranks may run different numbers of them; gradients that backwards left
    inside are reduced at its end, and a backward after it gathers the model again. With `writeback`, changed
    elements reach the masters: each rank's rows from that rank, or all from `modifier_rank`. Contexts nest.
    Yields `target`.
    """
    if isinstance(target, nn.Module):
        parameters: list[Any] = list(target.parameters())
    else:
        parameters = [target] if isinstance(target, torch.Tensor) else list(target)
        other = next((each for each in parameters if not isinstance(each, torch.Tensor)), None)
        if other is not None:
            raise ValueError(f"gathered: {other!r} is no parameter; give a model, a module of it, or its parameters.")
    with ExitStack() as stack:
        for engine in ENGINES:
            units = _state.units_of(engine, parameters)
            if isinstance(target, nn.Module) and engine is engine_of(target):
                units = list(engine.units)
            if units:
                stack.enter_context(_state.gathered_engine(engine, units, writeback, modifier_rank))
        yield target


def full_state_dict(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
    trainable_only: bool = False,
) -> dict[str, Any]:
    """Return the whole state of a sharded model on the CPU: parameters, persistent buffers, extra states.

    Collective: call it on every rank. Names and their order are those of the model's own `state_dict`; tied names share
    one tensor. Values come from the masters. One unit is whole at a time on the device.

    Args:
        dtype: of floating-point parameters; None keeps what each was loaded in.
        rank0_only: the other ranks take part and get an empty dict, which saves host memory.
        trainable_only: leave frozen parameters, buffers and extra states out.
    """
    return _state.full_state_dict(
        sharded_engine(model), dtype=dtype, rank0_only=rank0_only, trainable_only=trainable_only
    )


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load whole tensors by name into a sharded model; every rank gives the same `state`, and keeps its rows.

    Names and shapes are checked before anything is changed.

    Raises:
        ValueError: what is missing, unexpected or of another shape; without `strict` of another shape alone.
    """
    _state.load_full_state_dict(sharded_engine(model), state, strict)


def reset(model: nn.Module) -> None:
    """Make a sharded model usable again after an exception that was caught. Gradients are dropped."""
    sharded_engine(model).reset()
