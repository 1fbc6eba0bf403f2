"""A Trainer's `checkpoint-N` in our sharded format: how it is written, which are kept, how the best one is loaded.

Note [A sharded checkpoint-N]
The Trainer writes its own files (configs, tokenizer, scheduler, random states, `trainer_state.json`); weights and
optimizer go into the folder `ourshard` beside them, each rank its own rows, at once or in the background. That folder's
manifest is written last of all, and has the hashes of those files that a resume reads. So a checkpoint is complete when
both agree, whatever was under its name before. Older ones are removed, and `latest` is set, after that.

A disk that fails loses that save: it is logged, training goes on, and the end of training says it once more. Every
other error is raised. PEFT models are left to `trainer.py`: an adapter is small, and others read it whole.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ourshard.checkpoint import commit, running
from ourshard.checkpoint.agreeing import together
from ourshard.checkpoint.background import BACKGROUND
from ourshard.checkpoint.sharded import ShardedSource, is_ours
from ourshard.checkpoint.source import CheckpointError
from ourshard.config import WhenBusy
from ourshard.integrations import beside_files, models
from ourshard.integrations.beside_files import FILES, files_problem
from ourshard.integrations.saving import sharded_folder
from ourshard.runtime.api import Engine

logger = logging.getLogger("ourshard")

Method = Callable[..., Any]

STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
_TORCH_DISK_ERRORS = ("PytorchStreamWriter", "unexpected pos", "Parent directory", "open file")  # RuntimeErrors
READ_AT_RESUME = (STATE, SCHEDULER, "scaler.pt", "rng_state*.pth")
WHOLE = ("optimizer.pt", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")

_writing: WeakKeyDictionary[Any, list[Exception]] = WeakKeyDictionary()  # Trainer in `save` -> what failed there so far
_lost: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()  # Trainer -> its checkpoints that were not written


def engine_for(trainer: Any) -> Engine | None:
    """Return the engine of a Trainer whose checkpoints are to be written by rows; None: whole, as under DDP."""
    engine = models.engine_of(trainer.model)
    if engine is None or not engine.config.checkpoint.shards_trainer or hasattr(trainer.model, "peft_config"):
        return None
    return engine


def is_writing(trainer: Any) -> bool:
    """Tell whether what the Trainer writes now is to be without weights and optimizer."""
    return trainer in _writing


def inner_folder(folder: Path) -> Path:
    """Return where the rows of a `checkpoint-N` lie."""
    return commit.standing(sharded_folder(folder, 0))


def is_sharded(folder: Path) -> bool:
    """Tell whether a `checkpoint-N` has rows."""
    return is_ours(inner_folder(folder))


def save(method: Method, trainer: Any, engine: Engine, model: Any, trial: Any) -> None:
    """Stand around `Trainer._save_checkpoint`: see Note [A sharded checkpoint-N]. Collective."""
    root = Path(trainer._get_output_dir(trial=trial))
    folder = root / f"checkpoint-{trainer.state.global_step}"
    if _skips(trainer, engine):
        return
    best = trainer.state.best_model_checkpoint
    try:
        with together(engine, f"{folder.name}: files of the Trainer"):
            _write_files(method, trainer, model, trial, folder)
        with together(engine, f"{folder.name}: hashes of these files"):
            hashes = hashes_of(folder) if trainer.args.should_save else {}
        limit, kept = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        running.write(
            models.inner(trainer.model),
            None if trainer.args.save_only_model else trainer.optimizer,
            sharded_folder(folder, 0),
            client_state={FILES: hashes},
            replace=True,
            then=functools.partial(_clear_up, folder.absolute(), limit, [Path(kept).absolute()] if kept else []),
            several_disks=trainer.args.save_on_each_node,
        )
    except OSError as error:
        if trainer.state.best_model_checkpoint == str(folder):
            trainer.state.best_model_checkpoint = best
        _say_lost(trainer, f"{folder}: {error}")


def _skips(trainer: Any, engine: Engine) -> bool:
    try:
        return running.skips(engine)
    except CheckpointError as error:  # of the save before, which was logged
        _lost.setdefault(trainer, []).append(str(error))
        return False


def _write_files(method: Method, trainer: Any, model: Any, trial: Any, folder: Path) -> None:
    limit = trainer.args.save_total_limit
    trainer.args.save_total_limit = None  # the last good one stays until this one is complete
    failed: list[Exception] = []
    _writing[trainer] = failed
    try:
        if trainer.args.should_save:
            attempt(trainer, lambda: (folder / STATE).unlink(missing_ok=True))
        method(trainer, model, trial)
        for pattern in WHOLE if trainer.args.should_save else ():
            for path in folder.glob(pattern):
                path.unlink()
        if failed:
            raise failed[0]
    except RuntimeError as error:
        if any(word in str(error) for word in _TORCH_DISK_ERRORS):
            raise OSError(str(error).splitlines()[0]) from error
        raise
    finally:
        del _writing[trainer]
        trainer.args.save_total_limit = limit


def attempt(trainer: Any, action: Callable[[], None]) -> None:
    """Write something; if it fails, raise that when the Trainer is through: it waits for all ranks in between."""
    try:
        action()
    except Exception as error:
        _writing[trainer].append(error)


def save_scheduler(trainer: Any, folder: str) -> None:
    """Write the scheduler's state, beside which the Trainer itself would write the optimizer's."""
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder, SCHEDULER))


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the hashes of the files beside the rows that a resume reads."""
    return beside_files.hashes_of(folder, READ_AT_RESUME)


def _clear_up(folder: Path, limit: int | None, kept: list[Path]) -> None:
    """Name the checkpoint that is now in its place the latest, and remove old ones. On rank 0, without collectives."""
    root, inner = folder.parent, sharded_folder(Path(), 0).name
    commit.set_latest(root, folder.name)
    kept = [folder, *kept]  # whatever its number: others may be of a run before
    for path in commit.retain(root, limit, inner=inner, besides=kept) if limit is not None and limit > 0 else ():
        logger.info("Removed %s: save_total_limit is %d.", path, limit)


def _say_lost(trainer: Any, problem: str) -> None:
    _lost.setdefault(trainer, []).append(problem)
    if trainer.args.process_index == 0:
        logger.error("A checkpoint was not written, and training goes on: %s", problem)


def finish(trainer: Any) -> None:
    """Wait for the last checkpoint before the Trainer loads the best and removes others; say which were lost."""
    try:
        BACKGROUND.wait()
    except CheckpointError as error:
        _lost.setdefault(trainer, []).append(str(error))
    lost, lead = _lost.pop(trainer, []), trainer.args.process_index == 0
    if lost and lead:
        logger.error("%d checkpoints of this training were not written; the last: %s", len(lost), lost[-1])
    best = trainer.state.best_model_checkpoint
    problem = problem_of(Path(best)) if best is not None and not _is_whole(Path(best)) else None
    if problem is not None:
        if lead:
            logger.error("The best checkpoint is not complete, so the last weights stay: %s", problem)
        trainer.state.best_model_checkpoint = None  # with it, others would be removed in favour of it


def _is_whole(folder: Path) -> bool:
    return any(True for pattern in WHOLE for _ in folder.glob(pattern))


def check(trainer: Any) -> None:
    """Refuse what can't be, before training.

    Raises:
        ValueError: saves in the background are asked for where they can't be, or the folders are of another kind.
    """
    config = trainer.accelerator.ourshard_plugin.config.checkpoint
    args = trainer.args
    if not config.shards_trainer or args.save_strategy == "no":
        return
    if hasattr(trainer.model, "peft_config"):
        if config.asynchronous:
            raise ValueError(
                "checkpoint.asynchronous: a Trainer writes an adapter whole and at once, which is small; use false."
            )
        return
    pushes = args.push_to_hub and args.hub_strategy != "end"
    if pushes:
        raise ValueError(
            f"hub_strategy: {args.hub_strategy} needs weights, and a checkpoint has rows; set checkpoint.format to "
            "full and asynchronous to false, or leave it out."
        )
    if config.when_busy is WhenBusy.SKIP and args.load_best_model_at_end:
        raise ValueError("checkpoint.when_busy: skip may leave out the best model, load_best_model_at_end; use wait.")


# ---- loading -----------------------------------------------------------------------------------------------


def load(trainer: Any, folder: Path) -> None:
    """Load weights, and the optimizer unless it was not saved, into a Trainer that is prepared. Collective.

    Raises CheckpointError on all ranks, as `ourshard.load` does.
    """
    inner = inner_folder(folder)
    with ShardedSource(inner) as source:
        world, has_optimizer = source.description.world_size, bool(source.description.param_groups)
    running.load(models.inner(trainer.model), trainer.optimizer if has_optimizer else None, inner)
    if trainer.args.process_index == 0:
        if not has_optimizer:
            logger.warning("%s was saved with save_only_model: the optimizer and the schedule begin anew.", folder)
        if world != trainer.args.world_size:
            _say_other_world(world, trainer.args)


def _say_other_world(before: int | None, args: Any) -> None:
    now = args.world_size
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    fresh = f", ranks {before} to {now - 1} go on with fresh ones" if before is not None and before < now else ""
    logger.warning(
        "The checkpoint is of %s ranks, and %d go on: a step is now %d examples, and the place in the data is counted "
        "in such steps. Keep per_device_train_batch_size * gradient_accumulation_steps * ranks to go on with the same "
        "examples. Each rank takes the random states of its number%s.",
        before, now, batch * now, fresh,
    )  # fmt: skip


def load_weights(trainer: Any, folder: Path, model: Any) -> None:
    """Stand around `Trainer._load_from_checkpoint`: look at the Trainer's files, and load if nothing will do it later.

    Raises:
        CheckpointError: a file is not the one that was saved.
        ValueError: the model is not sharded, and is not about to be.
    """
    with ShardedSource(inner_folder(folder)) as source:
        problem = files_problem(folder, source.description.client_state)
    if problem is not None:
        raise CheckpointError(f"nothing was loaded: {problem}")
    if trainer.is_in_train:
        return  # weights come with the optimizer's state, once `prepare` has sharded the model
    if models.engine_of(model) is None:
        raise ValueError(
            f"{folder} has the rows of a sharded model, and this one is not sharded; `ourshard convert {folder} DIR "
            "--to safetensors` makes a folder for from_pretrained."
        )
    running.load(models.inner(model), None, inner_folder(folder))


def problem_of(folder: Path) -> str | None:
    """Return why a `checkpoint-N` that has rows is not complete; None if it is. Reads no rows."""
    problem = commit.problem_of(inner_folder(folder))
    if problem is not None:
        return problem
    with ShardedSource(inner_folder(folder)) as source:
        return files_problem(folder, source.description.client_state)


def load_best(trainer: Any, folder: Path) -> None:
    """Load the weights of the best checkpoint. Collective."""
    if trainer.args.process_index == 0:
        logger.info("Loading best model from %s (score: %s).", folder, trainer.state.best_metric)
    running.load(models.inner(trainer.model), None, inner_folder(folder))
