"""What ourshard needs of transformers and PEFT, looked at before anything is patched; see `seams.py`."""

from __future__ import annotations

import functools
import inspect
from enum import Enum
from types import ModuleType
from typing import NamedTuple

from ourshard.integrations.seams import missing, moved

TRIED = "5.3 and 5.24"


class When(Enum):
    """Which calls of a Trainer's method go through ours; all others go to the Trainer's own alone."""

    ALWAYS = "always"
    ASKED = "while ourshard is on in this process"
    SHARDED = "of a Trainer whose Accelerator is ours"


class Around(NamedTuple):
    """A function of ours that stands around a method of `Trainer`, under the method's name."""

    module: str  # of `ourshard.integrations`, imported at the first call
    when: When
    parameters: tuple[str, ...]  # of the method: what ours passes or takes


# `transformers.trainer.Trainer`
TRAINER = {
    "save_model": Around("trainer", When.SHARDED, ("output_dir", "_internal_call")),
    "_save": Around("trainer", When.SHARDED, ("output_dir", "state_dict")),
    "_save_checkpoint": Around("trainer_resume", When.SHARDED, ("model", "trial")),
    "_save_optimizer_and_scheduler": Around("trainer", When.SHARDED, ("output_dir",)),
    "_load_optimizer_and_scheduler": Around("trainer", When.SHARDED, ("checkpoint",)),
    "_evaluate": Around("trainer_events", When.ALWAYS, ("trial",)),
    "_load_best_model": Around("trainer", When.SHARDED, ()),
    "_finalize_training": Around("trainer", When.SHARDED, ("trial",)),
    "_load_from_checkpoint": Around("trainer", When.SHARDED, ("resume_from_checkpoint", "model")),
    "_move_model_to_device": Around("trainer", When.SHARDED, ("model", "device")),
    "create_accelerator_and_postprocess": Around("trainer_blocks", When.ASKED, ()),
    "create_optimizer": Around("trainer_blocks", When.ASKED, ()),
    "create_scheduler": Around("trainer_blocks", When.ASKED, ("num_training_steps", "optimizer")),
    "_maybe_log_save_evaluate": Around("trainer_events", When.ALWAYS, ()),
    "compute_loss": Around("trainer_loss", When.SHARDED, ("model", "inputs", "return_outputs", "num_items_in_batch")),
    "evaluation_loop": Around("trainer_evaluation", When.SHARDED, ("dataloader", "description")),
    "log": Around("trainer_events", When.ALWAYS, ("logs",)),
    "train": Around("trainer_recovery", When.SHARDED, ("resume_from_checkpoint",)),
    "init_hf_repo": Around("trainer_hub", When.SHARDED, ("token",)),
    "push_to_hub": Around("trainer_hub", When.SHARDED, ("commit_message",)),
    "_push_from_checkpoint": Around("trainer_hub", When.SHARDED, ("checkpoint_folder",)),
}
USED = {
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "_issue_warnings_after_load": ("load_result",),
    "_get_output_dir": ("trial",),
    "_save_rng_state": ("output_dir",),
}  # called, not wrapped
# `transformers.modeling_utils.PreTrainedModel`
MODEL: dict[str, tuple[str, ...]] = {
    "_load_pretrained_model": ("model", "state_dict", "checkpoint_files", "load_config"),
    "save_pretrained": ("save_directory", "is_main_process", "state_dict"),
}
# `peft.peft_model.PeftModel`
PEFT: dict[str, tuple[str, ...]] = {
    "save_pretrained": ("save_directory", "is_main_process"),
    "get_prompt_embedding_to_save": ("adapter_name",),
}


@functools.cache
def saves_on_writers_alone(cls: type) -> bool:
    """Tell whether `save_model` calls `_save` on the ranks that write alone, as the Trainer of 5.3 does."""
    trainer = next(base for base in cls.__mro__ if base.__module__ == "transformers.trainer")
    return "elif self.args.should_save:" in inspect.getsource(inspect.unwrap(vars(trainer)["save_model"]))


def of_trainer(module: ModuleType) -> list[str]:
    """Return what is missing in `transformers.trainer`, as text; empty when all is there."""
    if not hasattr(module, "Trainer"):
        return ["Trainer"]
    functions = [] if callable(getattr(module, "get_last_checkpoint", None)) else ["get_last_checkpoint"]
    return missing(module.Trainer, {name: around.parameters for name, around in TRAINER.items()} | USED) + functions


def of_arguments(module: ModuleType) -> list[str]:
    """Return what is missing in `transformers.training_args`."""
    cls = getattr(module, "TrainingArguments", None)
    if not isinstance(cls, type):
        return ["TrainingArguments"]
    wanted = {"place_model_on_device": property, "__post_init__": object}
    return [
        f"TrainingArguments.{name}"
        for name, kind in wanted.items()
        if not isinstance(inspect.getattr_static(cls, name, None), kind) or not hasattr(cls, name)
    ]


def of_model(module: ModuleType) -> list[str]:
    """Return what is missing in `transformers.modeling_utils`."""
    return missing(module.PreTrainedModel, MODEL) if hasattr(module, "PreTrainedModel") else ["PreTrainedModel"]


def of_peft(module: ModuleType) -> list[str]:
    """Return what is missing in `peft.peft_model`."""
    return missing(module.PeftModel, PEFT) if hasattr(module, "PeftModel") else ["PeftModel"]


def message(package: str, lost: list[str]) -> str:
    """Return the error for a version of `package` whose seams moved."""
    return moved(package, lost, tried=f"transformers {TRIED}")
