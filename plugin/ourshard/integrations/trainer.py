"""What a Trainer does differently when its Accelerator is ours; each function stands around the method of its name.

The Trainer walks the path it walks under DDP: one file for the model, one for the optimizer, both written by rank 0.
What is written is whole, so a checkpoint of ours resumes under DDP and in one process, and theirs resume here. Where
the config asks for rows, `trainer_checkpoint.py` takes over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ourshard.checkpoint import running
from ourshard.checkpoint.foreign import is_foreign
from ourshard.checkpoint.sharded import is_ours
from ourshard.integrations import (
    foreign_resume,
    loading,
    models,
    optimizer_state,
    plain_optimizer,
    trainer_checkpoint,
)
from ourshard.integrations import transformers_seams as seams
from ourshard.integrations.pretrained import save_dtype
from ourshard.integrations.trainer_checkpoint import SCHEDULER
from ourshard.runtime.part import engines_in, part_state

logger = logging.getLogger("ourshard")

Method = Callable[..., Any]

WEIGHTS = {"single": "model.safetensors", "index": "model.safetensors.index.json"}
OPTIMIZER, SCALER = "optimizer.pt", "scaler.pt"


def _move_model_to_device(method: Method, trainer: Any, model: nn.Module, device: torch.device) -> None:
    """Leave the model where it is: `prepare` puts this rank's shard onto the device."""


def save_model(method: Method, trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Gather on ranks that don't write, too, where this version of the Trainer calls `_save` on the others alone."""
    outside = not trainer.args.should_save and seams.saves_on_writers_alone(trainer.__class__)
    if outside and engines_in(trainer.model) and not trainer_checkpoint.is_writing(trainer):
        _gather_for_writers(trainer, output_dir)
    method(trainer, output_dir, _internal_call)


def _gather_for_writers(trainer: Any, output_dir: str | None) -> None:
    if isinstance(trainer.model, _saves_itself()):
        trainer.model.save_pretrained(output_dir or trainer.args.output_dir, is_main_process=False)
    else:
        part_state(trainer.model, "Trainer.save_model", dtype=save_dtype(trainer.model), keep=False)


def _save(method: Method, trainer: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
    """Gather on every rank what the writing ranks write. The Trainer itself would leave all but those outside."""
    if trainer_checkpoint.is_writing(trainer):
        if trainer.args.should_save:
            trainer_checkpoint.attempt(trainer, lambda: method(trainer, output_dir, {}))
    elif state_dict is not None or not engines_in(trainer.model):
        method(trainer, output_dir, state_dict)
    elif not trainer.args.should_save:
        _gather_for_writers(trainer, output_dir)
    elif isinstance(trainer.model, _saves_itself()):
        method(trainer, output_dir)  # which gathers in `save_pretrained`
    else:
        state = part_state(trainer.model, "Trainer.save_model", dtype=save_dtype(trainer.model))
        method(trainer, output_dir, state)


def _saves_itself() -> tuple[Any, ...]:
    """Return the classes whose `save_pretrained` the Trainer calls."""
    from transformers import PreTrainedModel
    from transformers.utils import is_peft_available

    if not is_peft_available():
        return (PreTrainedModel,)
    from peft import PeftModel

    return (PreTrainedModel, PeftModel)


def _save_optimizer_and_scheduler(method: Method, trainer: Any, output_dir: str) -> None:
    """Write the whole state of the optimizer, in the form that any torch optimizer loads."""
    if trainer_checkpoint.is_writing(trainer):
        trainer_checkpoint.attempt(trainer, lambda: trainer_checkpoint.save_scheduler(trainer, output_dir))
        return
    prepared = trainer.optimizer
    engines = engines_in(trainer.model)
    if engines:
        whole = optimizer_state.gather(prepared.optimizer, engines, keep=trainer.args.should_save)
        trainer.optimizer = _Written(plain_optimizer.to_plain(whole, trainer.model, engines))
    try:
        method(trainer, output_dir)
    finally:
        trainer.optimizer = prepared


class _Written:
    """Stands in for an optimizer while its state is written."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _load_optimizer_and_scheduler(method: Method, trainer: Any, checkpoint: str | None) -> None:
    """Load the state that a Trainer wrote, sharded or not; each rank keeps what belongs to its rows."""
    engines = engines_in(trainer.model)
    if checkpoint is None or not engines:
        method(trainer, checkpoint)
        return
    folder = Path(checkpoint)
    if trainer_checkpoint.is_sharded(folder):
        trainer_checkpoint.load(trainer, folder)
        if (folder / SCHEDULER).is_file():
            _load_scheduler(trainer, folder)
        return
    if _is_of_another_engine(folder):
        _resume_from_another_engine(trainer, folder)
        return
    if not (folder / OPTIMIZER).is_file() or not (folder / SCHEDULER).is_file():
        return  # saved with save_only_model
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
    named = plain_optimizer.from_plain(saved, trainer.optimizer.optimizer, trainer.model, engines)
    optimizer_state.restore(trainer.optimizer.optimizer, engines, named, folder / OPTIMIZER)
    _load_scheduler(trainer, folder)


def _resume_from_another_engine(trainer: Any, folder: Path) -> None:
    kept, model = foreign_resume.look(folder), models.inner(trainer.model)
    if not kept.has_optimizer:
        if not trainer.args.save_only_model:
            raise ValueError(
                f"resume_from_checkpoint: nothing was loaded, as {folder} holds no state of an optimizer (was it saved "
                "with save_only_model?). To go on from its weights and its step with a new optimizer and schedule, set "
                "save_only_model=True; to begin anew from its weights, make a folder for from_pretrained: `ourshard "
                f"convert {folder} weights --to safetensors`."
            )
        running.load(model, None, folder, beside=True)
        logger.warning("Resumed from %s: weights and step; optimizer and schedule begin anew.", folder)
        return
    state = foreign_resume.trainer_scheduler(folder / SCHEDULER, kept)
    foreign_resume.refuse_scheduler(trainer.lr_scheduler, state, folder)
    running.load(model, trainer.optimizer, folder, beside=True)
    foreign_resume.put_scheduler(trainer.lr_scheduler, state)
    scaler = trainer.accelerator.scaler
    if scaler is not None and kept.scaler and not (folder / SCALER).is_file():
        scaler.load_state_dict(kept.scaler)
    foreign_resume.say_random_states(folder, trainer.args.world_size, trainer.is_world_process_zero())


def _load_scheduler(trainer: Any, folder: Path) -> None:
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))


def _is_of_another_engine(folder: Path) -> bool:
    """Tell whether a Trainer wrote the folder under DeepSpeed or FSDP, or `ourshard convert` made it of such a one."""
    return not (folder / OPTIMIZER).is_file() and (is_foreign(folder) or is_ours(folder))


def _load_from_checkpoint(method: Method, trainer: Any, folder: str, model: nn.Module | None = None) -> None:
    """Load a checkpoint's weights without holding them: each rank reads its rows, now or in `prepare`."""
    model = model if model is not None else trainer.model
    if trainer_checkpoint.is_sharded(Path(folder)):
        trainer_checkpoint.load_weights(trainer, Path(folder), model)
        return
    if trainer.is_in_train and _is_of_another_engine(Path(folder)):
        return  # weights come with the optimizer's state, once `prepare` has sharded the model
    files = loading.checkpoint_files(Path(folder), WEIGHTS)
    if not files or not (engines_in(model) or loading.wants_rows()):
        method(trainer, folder, model)
        return
    logger.info("Loading model from %s.", folder)
    result = models.inner(model).load_state_dict(loading.lazy_state(files), strict=False)
    trainer._issue_warnings_after_load(result)


def _load_best_model(method: Method, trainer: Any) -> None:
    """Load a best checkpoint that has rows, each rank its own."""
    folder = Path(trainer.state.best_model_checkpoint)
    if trainer_checkpoint.is_sharded(folder) and engines_in(trainer.model):
        trainer_checkpoint.load_best(trainer, folder)
    else:
        method(trainer)


def _finalize_training(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the last checkpoint be complete before the best is loaded and others are removed."""
    if trainer_checkpoint.engine_for(trainer) is not None:
        trainer_checkpoint.finish(trainer)
    return method(trainer, *args, **kwargs)
