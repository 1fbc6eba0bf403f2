"""Accelerate's `DummyOptim` and `DummyScheduler`, made into what they stand for.

A loop that leaves both to DeepSpeed's config prepares these two; here they are built from its `optimizer` and
`scheduler` blocks. As accelerate does, an `"auto"` takes the dummy's value, and any other value is the config's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from ourshard.flags.blocks import build_optimizer, build_scheduler

Blocks = Mapping[str, Any]
_MADE = "_ourshard_made"  # on a dummy: what was built for it, so that its scheduler finds it, and a second `prepare`
_BY_STEPS = "_ourshard_by_steps"  # on a scheduler: it counts optimizer steps, as DeepSpeed's engine steps it


def made(objects: tuple[Any, ...], blocks: Blocks) -> list[Any]:
    """Return the objects that a script prepares, with the optimizer and the scheduler that its dummies stand for.

    Raises:
        ValueError: the config has no such block, or one that can't be built.
    """
    kinds = {DummyOptim: _optimizer, DummyScheduler: _scheduler}
    return [kinds[type(each)](each, blocks) if type(each) in kinds else each for each in objects]


def counts_steps(scheduler: Any) -> bool:
    """Return whether a scheduler goes on by one at each optimizer step, however many ranks there are."""
    return getattr(scheduler, _BY_STEPS, False)


def _optimizer(dummy: Any, blocks: Blocks) -> Any:
    if not hasattr(dummy, _MADE):
        block = _block("optimizer", "DummyOptim", blocks)
        filled = _filled(block, {"lr": dummy.lr, "weight_decay": dummy.weight_decay})
        setattr(dummy, _MADE, build_optimizer(filled, dummy.params))
    return getattr(dummy, _MADE)


def _scheduler(dummy: Any, blocks: Blocks) -> Any:
    if hasattr(dummy, _MADE):
        return getattr(dummy, _MADE)
    given = dummy.optimizer
    optimizer = _optimizer(given, blocks) if isinstance(given, DummyOptim) else given
    optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if dummy.lr_scheduler_callable is not None:
        scheduler = dummy.lr_scheduler_callable(optimizer)
    else:
        values = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": getattr(given, "lr", None) or optimizer.defaults["lr"],
            "warmup_num_steps": dummy.warmup_num_steps,
            "total_num_steps": dummy.total_num_steps,
        }
        scheduler = build_scheduler(_filled(_block("scheduler", "DummyScheduler", blocks), values), optimizer)
    setattr(scheduler, _BY_STEPS, True)
    setattr(dummy, _MADE, scheduler)
    return scheduler


def _block(name: str, dummy: str, blocks: Blocks) -> Mapping[str, Any]:
    if name not in blocks:
        raise ValueError(
            f"{dummy}: the DeepSpeed config of this run has no {name} block, which it stands for; write one, or create "
            f"the {name} in the script."
        )
    block: Mapping[str, Any] = blocks[name]
    return block


def _filled(block: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with each `"auto"` in its parameters replaced by a value, or left out where there is none."""
    said = dict(block.get("params") or {})
    params = {key: values.get(key) if value == "auto" else value for key, value in said.items()}
    return {**block, "params": {key: value for key, value in params.items() if value is not None}}
