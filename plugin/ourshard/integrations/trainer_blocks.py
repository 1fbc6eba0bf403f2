"""The `optimizer`, `scheduler` and `fp16` blocks of a DeepSpeed config, for a Trainer that is ours.

They stand in `TrainingArguments(deepspeed=...)`, or in the file of `accelerate launch`, which hands on the first two.

DeepSpeed builds an optimizer and a schedule where its config has a block for them, and the Trainer builds none; scaling
of fp16 losses is set there, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ourshard.config import ReduceOp
from ourshard.flags.blocks import build_optimizer, build_scheduler
from ourshard.flags.deepspeed import from_deepspeed
from ourshard.flags.objects import auto_from_training_arguments, from_training_arguments
from ourshard.flags.result import RunSettings
from ourshard.integrations import switch
from ourshard.runtime.in_backward import NO_CLIPPING
from ourshard.runtime.scaler import ShardGradScaler

Method = Callable[..., Any]


def _said(args: Any, total_steps: int | None = None) -> RunSettings:
    result = from_training_arguments(args, total_steps=total_steps)
    blocks = switch.handed_on(switch.BLOCKS) if result is None else {}
    if blocks:
        auto = auto_from_training_arguments(args, total_steps)
        result = from_deepspeed(blocks, auto, "the DeepSpeed config of accelerate launch")
    return result.run if result is not None else RunSettings()


def create_accelerator_and_postprocess(method: Method, trainer: Any) -> None:
    """Scale fp16 losses as the `fp16` block says, and keep checkpoints as `checkpoint` says: how many, and where."""
    method(trainer)
    if not getattr(trainer.accelerator, "is_ourshard", False):
        return
    _refuse_uneven(trainer)
    _refuse_clipping(trainer)
    _refuse_sums(trainer)
    checkpoint = trainer.accelerator.ourshard_plugin.config.checkpoint
    if trainer.args.save_total_limit is None:
        trainer.args.save_total_limit = checkpoint.keep
    if checkpoint.save_on_each_node:
        trainer.args.save_on_each_node = True
    settings = dict(_said(trainer.args).grad_scaler)
    if settings and trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler = ShardGradScaler(trainer.accelerator.device.type, **settings)


def _refuse_uneven(trainer: Any) -> None:
    """Raise ValueError where ranks would get batches of different numbers and sizes: a Trainer gathers them."""
    accelerator = trainer.accelerator
    if accelerator.num_processes > 1 and not (accelerator.even_batches or trainer.args.dataloader_drop_last):
        raise ValueError(
            "accelerator_config: even_batches=False gives the ranks batches of different numbers and sizes, which a "
            "Trainer gathers as if they were equal. Leave it out (rows that fill up a last batch are dropped from "
            "metrics), or set dataloader_drop_last=True, or join the ranks in a loop of your own with "
            "accelerator.join_uneven_inputs."
        )


def _refuse_sums(trainer: Any) -> None:
    """Raise ValueError where gradients of ranks are added: a Trainer scales its losses for their mean."""
    if trainer.accelerator.ourshard_plugin.config.communication.reduce_op is ReduceOp.SUM:
        raise ValueError(
            "communication.reduce_op: sum: a Trainer scales its losses for the mean over ranks, and would train with "
            "gradients that are larger by the number of ranks. Leave it out; sums are for loops of your own."
        )


def _refuse_clipping(trainer: Any) -> None:
    """Raise ValueError where the Trainer would clip to another norm than was said, or what is stepped before all."""
    largest = trainer.args.max_grad_norm
    told = os.environ.get(switch.GRADIENT_CLIPPING)
    if told is not None and float(told) != largest:
        raise ValueError(
            f"gradient_clipping: accelerate launch was given {told}, by its config or a flag, but the training "
            f"arguments say max_grad_norm={largest}. Neither overrides the other: let both say the same, or leave it "
            "out of the launch."
        )
    if largest and trainer.accelerator.ourshard_plugin.config.optimizer_in_backward:
        raise ValueError(f"TrainingArguments(max_grad_norm={largest}): {NO_CLIPPING}")


def create_optimizer(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the optimizer of the block, if there is one, over all parameters in one group, as DeepSpeed does."""
    block = _said(trainer.args).optimizer if trainer.optimizer is None else {}
    if not block:
        return method(trainer, *args, **kwargs)
    trainer.optimizer = build_optimizer(block, [p for p in trainer.model.parameters() if p.requires_grad])
    return trainer.optimizer


def create_scheduler(method: Method, trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    """Build the schedule of the block, if there is one."""
    block = _said(trainer.args, num_training_steps).scheduler if trainer.lr_scheduler is None else {}
    if not block:
        return method(trainer, num_training_steps, optimizer)
    trainer.lr_scheduler = build_scheduler(block, trainer.optimizer if optimizer is None else optimizer)
    trainer._created_lr_scheduler = True
    return trainer.lr_scheduler
