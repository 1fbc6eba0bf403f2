"""What ourshard needs of transformers and PEFT, looked at before anything is patched; see `seams.py`."""

from __future__ import annotations

import functools
import inspect
from importlib import metadata
from types import ModuleType

from ourshard.integrations.seams import missing

TRIED = "5.3 and 5.24"

# `transformers.trainer.Trainer`
TRAINER: dict[str, tuple[str, ...]] = {
    "save_model": ("output_dir", "_internal_call"),
    "_save": ("output_dir", "state_dict"),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_evaluate": ("trial",),
    "_load_best_model": (),
    "_finalize_training": ("trial",),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_move_model_to_device": ("model", "device"),
    "create_accelerator_and_postprocess": (),
    "create_optimizer": (),
    "create_scheduler": ("num_training_steps", "optimizer"),
    "_maybe_log_save_evaluate": (),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "evaluation_loop": ("dataloader", "description"),
    "log": ("logs",),
    "train": ("resume_from_checkpoint",),
    "init_hf_repo": ("token",),
    "push_to_hub": ("commit_message",),
    "_push_from_checkpoint": ("checkpoint_folder",),
}
RESUME = ("_save_checkpoint",)  # see `trainer_resume.py`
EVENTS = ("_evaluate", "_maybe_log_save_evaluate", "log")  # see `trainer_events.py`
LOSS = ("compute_loss",)  # see `trainer_loss.py`
EVALUATION = ("evaluation_loop",)  # see `trainer_evaluation.py`
RECOVERY = ("train",)  # see `trainer_recovery.py`
HUB = ("init_hf_repo", "push_to_hub", "_push_from_checkpoint")  # see `trainer_hub.py`
BLOCKS = ("create_accelerator_and_postprocess", "create_optimizer", "create_scheduler")  # see `trainer_blocks.py`
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
    return missing(module.Trainer, {**TRAINER, **USED}) + functions


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
    return (
        f"ourshard cannot work under {package} {metadata.version(package)}: {', '.join(lost)} is not where ourshard "
        f"takes hold of it. Tried: transformers {TRIED}. Install one of these; or, to run without ourshard, take it "
        "out of the config or set OURSHARD_DISABLE=1."
    )
