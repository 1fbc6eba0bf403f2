"""`ShardCheckpointCallback`: sharded checkpoints in the background, on a cadence of their own, and at SIGTERM."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ourshard.checkpoint import commit, running
from ourshard.checkpoint.agreeing import together
from ourshard.checkpoint.background import BACKGROUND
from ourshard.checkpoint.source import CheckpointError
from ourshard.integrations import models
from ourshard.integrations.beside_files import FILES
from ourshard.integrations.late_flag import LateFlag
from ourshard.integrations.saving import sharded_folder
from ourshard.integrations.trainer_checkpoint import SCHEDULER, STATE, hashes_of
from ourshard.integrations.trainer_events import ShardTrainerCallback
from ourshard.integrations.trainer_recovery import newest
from ourshard.runtime.api import engine_of
from ourshard.runtime.engine import Engine
from ourshard.runtime.part import part_state
from ourshard.values import is_number
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer

logger = logging.getLogger("ourshard")


class ShardCheckpointCallback(ShardTrainerCallback):
    """Writes `checkpoint-N` into a folder of its own, each rank its rows, while training goes on.

    They have what a Trainer resumes from, on any number of ranks: give `train` the newest complete one, as
    `resume_from_checkpoint=ShardCheckpointCallback.newest(folder)`, which is None in the beginning. The Trainer's own
    checkpoints are as they were. A step at whose end training stops is saved at once, before the Trainer does anything
    else: the last one, and that of a SIGTERM. Training is not changed. A disk that fails loses that save: it is logged,
    and said again at the end.

    Args:
        folder: where to, on a disk that all ranks see; by default `sharded` in `output_dir`.
        every_steps: optimizer steps between two saves.
        every_minutes: minutes between two saves, by the clock of rank 0.
        keep: how many complete ones stay; older ones are removed once a new one is complete. None keeps all.
        export: a folder for the whole model at the end of training, as `save_pretrained` writes it.

    Raises:
        ValueError: an argument is not above 0, or the model is not sharded by ourshard.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = 30.0,
        keep: int | None = 2,
        export: str | Path | None = None,
    ) -> None:
        self.require_events()
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes), ("keep", keep)):
            whole = name != "every_minutes"
            if value is not None and not (is_number(value, whole=whole) and value > 0):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"ShardCheckpointCallback: {name} is {value!r}; give {kind} above 0, or None.")
        self.folder = None if folder is None else Path(folder)
        self.every_steps, self.every_minutes, self.keep, self.export = every_steps, every_minutes, keep, export
        self.lost: list[str] = []  # saves that failed, with the reason
        self._due = False
        self._saved = -1  # the step of the last save
        self._last = 0.0  # when it was
        self._time_is_up: LateFlag | None = None
        self._others: list[ShardTrainerCallback] = []  # that may have something to write beside the rows

    @staticmethod
    def newest(folder: str | Path) -> str | None:
        """Return the newest complete checkpoint in a folder of such; None if there is none. Call it on all ranks."""
        return newest(str(folder))

    # ---- events --------------------------------------------------------------------------------------------

    def before_train(self, resume: Path | None, callbacks: Sequence[ShardTrainerCallback]) -> None:
        """Note whom to ask for what they need to go on."""
        self._others = [callback for callback in callbacks if callback is not self]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to count steps and minutes."""
        if engine_of(model) is None:
            raise ValueError(
                f"ShardCheckpointCallback: {type(model).__name__} is not sharded by ourshard; ask for ourshard, or "
                "leave the callback out."
            )
        self._due, self._saved, self.lost = False, state.global_step, []
        self._last = time.monotonic()
        self._time_is_up = LateFlag("checkpoints") if self.every_minutes is not None else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save at once where training stops; else note that a save is due."""
        if self.every_steps is not None and state.global_step % self.every_steps == 0:
            self._due = True
        if self._time_is_up is not None:
            assert self.every_minutes is not None
            passed = time.monotonic() - self._last > 60 * self.every_minutes
            self._due |= self._time_is_up.raised(passed and state.is_world_process_zero and not self._due)
        if control.should_training_stop:
            self._save(args, state, background=False, **kwargs)

    def after_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what is due, now that the step is logged and evaluated; later, while another save is being written."""
        if state.global_step == self._saved:
            self._due = False
        elif control.should_training_stop:  # an evaluation says so
            self._save(args, state, background=False, **kwargs)
        elif self._due:
            engine = engine_of(kwargs["model"])
            assert engine is not None
            if not engine.control.any_of([BACKGROUND.busy], "checkpoints: is one being written")[0]:
                self._save(args, state, background=True, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Wait for the last save, and export."""
        if self._time_is_up is not None:
            self._time_is_up.finish()
        self._wait()
        if self.lost and state.is_world_process_zero:
            logger.error("%d saves of this training failed; the last: %s", len(self.lost), self.lost[-1])
        if self.export is not None:
            export(model, Path(self.export), args.should_save, kwargs.get("processing_class"))

    # ---- saving --------------------------------------------------------------------------------------------

    def _save(
        self, args: Any, state: Any, *, background: bool, model: Any, optimizer: Any, lr_scheduler: Any, **kwargs: Any
    ) -> None:
        """Write `checkpoint-N`. Collective."""
        self._due, self._saved, self._last = False, state.global_step, time.monotonic()
        self._wait()
        engine = engine_of(model)
        assert engine is not None
        folder = (self.folder or Path(args.output_dir, "sharded")) / f"checkpoint-{state.global_step}"
        writes = [callback.beside_checkpoint(model) for callback in self._others]

        def files() -> None:
            torch.save(lr_scheduler.state_dict(), folder / SCHEDULER)
            if getattr(optimizer, "scaler", None) is not None:
                torch.save(optimizer.scaler.state_dict(), folder / "scaler.pt")
            for write in writes:
                write(folder)
            state.save_to_json(str(folder / STATE))

        try:
            hashes = _write_files(engine, folder, args, files)
            running.write(
                models.inner(model),
                optimizer,
                sharded_folder(folder, 0),
                client_state={FILES: hashes},
                replace=True,
                then=functools.partial(self._retain, folder.absolute()),
                background=background,
                several_disks=False,
            )
        except OSError as error:
            self._lose(f"{folder}: {error}", state.is_world_process_zero)

    def _retain(self, new: Path) -> None:
        """Remove older ones, on rank 0, now that a new one is in its place."""
        inner = sharded_folder(Path(), 0).name
        for path in commit.retain(new.parent, self.keep, inner=inner, besides=[new]) if self.keep else ():
            logger.info("Removed %s: keep is %d.", path, self.keep)

    def _wait(self) -> None:
        """Wait for the save before; what became of it is the same on all ranks, and was logged."""
        try:
            BACKGROUND.wait()
        except CheckpointError as error:
            self.lost.append(str(error))

    def _lose(self, problem: str, says: bool) -> None:
        self.lost.append(problem)
        if says:
            logger.error("A checkpoint was not written, and training goes on: %s", problem)


def _write_files(engine: Engine, folder: Path, args: Any, files: Callable[[], None]) -> dict[str, str]:
    """Write what lies beside the rows, by `files` on rank 0; return the hashes of what a resume reads, on rank 0."""
    lead = engine.mesh.world.rank == 0
    with together(engine, f"{folder.name}: files of the Trainer"):
        Trainer._save_rng_state(SimpleNamespace(args=args), str(folder))  # type: ignore[arg-type]
        if lead:
            files()
    with together(engine, f"{folder.name}: hashes of these files"):
        return hashes_of(folder) if lead else {}


def export(model: nn.Module, folder: Path, writes: bool, processing_class: Any = None) -> None:
    """Write the whole model, and its tokenizer or processor, for `from_pretrained`. Collective."""
    if isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        model.save_pretrained(folder, is_main_process=writes)  # type: ignore[operator]
    else:
        state = part_state(model, "ShardCheckpointCallback: export", keep=writes)
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    if writes and processing_class is not None:
        processing_class.save_pretrained(folder)
