"""Saving and loading through an `Accelerator` whose models are sharded.

`save_state` writes a folder `ourshard` (`ourshard_1`, ... for further models) with weights and optimizers in our
sharded format, last of all, so that a folder that has it is complete; the rest are accelerate's own files. With
`checkpoint.format: full` weights are whole, as accelerate writes them, and optimizers too, by parameter name
(`optimizer_state.py`). Both load on any number of ranks and at any stage, whatever the format that is now asked for.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME

from ourshard.checkpoint import commit, running
from ourshard.checkpoint.agreeing import together
from ourshard.checkpoint.background import wait_for_save
from ourshard.checkpoint.foreign import is_foreign
from ourshard.checkpoint.numbered import of_model
from ourshard.checkpoint.sharded import FOLDER as SHARDED_FOLDER
from ourshard.checkpoint.sharded import ShardedSource, is_ours
from ourshard.checkpoint.source import CheckpointError
from ourshard.config import CheckpointFormat
from ourshard.integrations import (
    foreign_resume,
    models,
    optimizer_state,
    planned_files,
    pretrained,
    retention,
    stopping,
)
from ourshard.integrations.beside_files import FILES, files_problem, hashes_of
from ourshard.integrations.optimizer import refuse_to_save_strangers
from ourshard.integrations.planned_files import Outlines, Planned, Taken, plan_of
from ourshard.integrations.retention import OPTIMIZER_FILE
from ourshard.runtime import api
from ourshard.runtime.graphs import let_go_of_graphs
from ourshard.runtime.on_host import showing
from ourshard.runtime.part import engines_in, is_here, part_state

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object

READ_AT_LOAD = (
    "scheduler*.bin",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "scaler.pt",
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
)

logger = logging.getLogger("ourshard")


class SavingMixin(_Base):
    """Whole state dicts, and the folders of `save_state`."""

    _for_files = False  # what is gathered now is for files: only the writing ranks keep it
    _outlines: Outlines | None = None  # accelerate plans files: Note [Outlines] in planned_files.py
    _taken: list[Taken]
    _sharded_states: list[dict[str, Any]] | None = None  # not for accelerate to write

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole parameters and buffers on the CPU, on every rank, as under DDP. Collective.

        Tied names share one tensor. The dtype is the one the model was loaded in, or `checkpoint.save_dtype`. `model`
        may be a part of one that was prepared, or hold such models. A rank that has all of it whole may call it alone.
        """
        found = models.inner(model)
        if not engines_in(found):
            return super().get_state_dict(model, unwrap)
        if self._outlines is not None:
            return dict(self._outlines)
        only_rank0 = self._for_files and not self.project_configuration.save_on_each_node
        by_rows = self._sharded_states if api.engine_of(found) is not None else None
        if by_rows is not None and len(self._save_model_state_pre_hook) == 1:
            state: dict[str, Any] = {}  # no hook but ours is there to look at it
        else:
            state = _whole_state(found, keep=not only_rank0 or self.is_main_process)
        if by_rows is not None:
            by_rows.append(state)
        return state

    @property
    def _writes_files(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each_node else self.is_main_process

    @contextmanager
    def _gathering_for_files(self) -> Iterator[None]:
        self._for_files = True
        try:
            yield
        finally:
            self._for_files = False

    @contextmanager
    def _without_optimizers(self) -> Iterator[list[Any]]:
        """Hide the optimizers from accelerate's own saving, which would write one rank's shards."""
        optimizers: list[Any] = self._optimizers  # type: ignore[has-type]
        self._optimizers = []
        try:
            yield optimizers
        finally:
            self._optimizers = optimizers

    def save_model(
        self, model: torch.nn.Module, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Write the whole model as accelerate does; call it on all ranks. Each writes its own rows where it can."""
        sharded = bool(engines_in(models.inner(model)))
        if sharded:
            planned_files.refuse_objects(model)
            save_directory = os.path.expanduser(save_directory)
        safe = kwargs.get("safe_serialization", args[1] if len(args) > 1 else True)
        if sharded and safe and not self.project_configuration.save_on_each_node:

            def make_plan(outlines: Outlines) -> Planned | None:
                return self._plan_model(outlines, model, save_directory, args, kwargs)

            dtype = pretrained.save_dtype(models.inner(model))
            if planned_files.write(model, make_plan, writes=self.is_main_process, dtype=dtype, label="save_model"):
                return
        with self._gathering_for_files():
            super().save_model(model, save_directory, *args, **kwargs)

    def _plan_model(
        self, outlines: Outlines, model: torch.nn.Module, save_directory: Any, args: Any, kwargs: Any
    ) -> Planned | None:
        """Let accelerate write all but the files of tensors; return which these are."""
        self._outlines, self._taken = outlines, []
        try:
            super().save_model(model, save_directory, *args, **kwargs)
            return plan_of(outlines, self._taken)
        finally:
            self._outlines = None

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object as accelerate does."""
        if self._outlines is None:
            super().save(obj, f, safe_serialization=safe_serialization)
        else:
            self._taken.append(Taken(os.fspath(f), dict(obj), {"format": "pt"}))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Write models, optimizers, schedulers, RNG and everything else that `load_state` reads. Collective.

        If a rank fails, all raise. What `output_dir` held of our format before is then still there; it loads unless
        accelerate has written over its own files of that save, which `load_state` then says.
        """
        engines = self._engines()
        if engines:
            refuse_to_save_strangers(each.optimizer for each in self._optimizers)
        if output_dir is not None and engines:
            output_dir = os.path.expanduser(output_dir)  # as `load_state` does
        if engines and engines[0].config.checkpoint.format is not CheckpointFormat.FULL:
            return self._save_sharded(output_dir, *args, **kwargs)
        if not engines:
            return super().save_state(output_dir, *args, **kwargs)
        limit = retention.limit_of(self.project_configuration, engines[0].config.checkpoint)
        showing_whole, writing = self._showing_to_hooks(), together(engines[0], "save_state: whole models")
        with (
            self._keeping(),
            writing,
            self._gathering_for_files(),
            self._without_optimizers() as optimizers,
            showing_whole,
        ):
            location = super().save_state(output_dir, *args, **kwargs)
        for number, optimizer in enumerate(optimizers):
            whole = optimizer_state.gather(optimizer.optimizer, engines, keep=self._writes_files)
            with together(engines[0], f"save_state: optimizer {number}"):
                self.save(whole, _optimizer_file(location, number))
        with together(engines[0], "save_state: clearing up"):
            if self._writes_files:  # what `load_state` would take first
                for number in range(len(self._models)):
                    commit.abandon(sharded_folder(Path(location), number))
                retention.clear(Path(location), limit)
        return location

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep old checkpoints until the new one is complete, and the number of one that fails: it may be there."""
        project = self.project_configuration
        iteration = project.iteration
        try:
            with retention.without_limit(project):
                yield
        except Exception:
            project.iteration = iteration + 1  # accelerate wants no folder of the next number
            raise

    def _save_sharded(self, output_dir: str | None, *args: Any, **kwargs: Any) -> Any:
        engines = self._engines()
        if running.skips(engines[0]):
            return output_dir
        limit = retention.limit_of(self.project_configuration, engines[0].config.checkpoint)
        project = self.project_configuration
        with self._keeping(), together(engines[0], "save_state"), self._without_optimizers() as optimizers:
            location = self._save_rest(output_dir, *args, **kwargs)
        with together(engines[0], "save_state: hashes"):
            beside = hashes_of(Path(location), READ_AT_LOAD) if self._writes_files else {}
        numbers = [n for n in reversed(range(len(self._models))) if models.engine_of(self._models[n]) is not None]
        for number in numbers:
            folder = sharded_folder(Path(location), number)
            if number != numbers[0]:
                wait_for_save()
            clear = functools.partial(retention.clear, Path(location).absolute(), limit, folder.name)
            then = clear if number == numbers[-1] else None
            running.write(
                models.inner(self._models[number]),
                optimizers,
                folder,
                client_state={FILES: beside},
                replace=True,
                then=then,
                several_disks=project.save_on_each_node,
            )
        return location

    def _save_rest(self, output_dir: str | None, *args: Any, **kwargs: Any) -> Any:
        """Write what is not ours, with no weights of sharded models; hooks of users see them as ever."""
        ours: list[dict[str, Any]] = []

        def drop_sharded(found: list[torch.nn.Module], weights: list[Any], where: str) -> None:
            weights[:] = [state for state in weights if not any(state is own for own in ours)]

        handle = self.register_save_state_pre_hook(drop_sharded)
        self._sharded_states = ours
        try:
            with self._gathering_for_files(), self._showing_to_hooks():
                return super().save_state(output_dir, *args, **kwargs)
        finally:
            self._sharded_states = None
            handle.remove()

    @contextmanager
    def _showing_to_hooks(self) -> Iterator[None]:
        """Let hooks of users find models whole on the ranks that write: many save them there, on the first rank alone.

        What ranks without the values would save meanwhile, they don't: `held_elsewhere`.
        """
        hooks = self._save_model_state_pre_hook
        if len(hooks) == (self._sharded_states is not None):  # ours alone
            yield
            return
        with ExitStack() as stack:

            def show(found: list[torch.nn.Module], weights: list[Any], where: str) -> None:
                for model, state in zip(found, weights, strict=True):
                    if models.engine_of(model) is not None:
                        stack.enter_context(showing(models.inner(model), state))
                        stack.enter_context(pretrained.held_elsewhere(not state))

            def end(found: list[torch.nn.Module], weights: list[Any], where: str) -> None:
                stack.close()

            first, last = self.register_save_state_pre_hook(show), self.register_save_state_pre_hook(end)
            hooks.move_to_end(first.id, last=False)
            try:
                yield
            finally:
                first.remove()
                last.remove()

    def load_state(self, input_dir: str | None = None, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Load what `save_state` wrote, here or under another engine, on any number of ranks. Collective.

        Without `strict`, sharded models may have other parameters than the folder: those keep what they have. With
        names that accelerate gives, the next `save_state` gets the number after the last folder's.
        """
        wait_for_save()
        naming = input_dir is None and self.project_configuration.automatic_checkpoint_naming
        if naming:
            input_dir = self._newest_complete()
        folder: list[Path] = []
        sharded: list[int] = []

        def load_models(found: list[torch.nn.Module], where: str) -> None:
            """Load what the user's hooks left over; stock accelerate would load rank 0's file into shards."""
            folder.append(Path(where))
            sharded.extend(self._load_sharded(found, Path(where), optimizers, strict))
            for number in reversed(range(len(found))):
                if models.engine_of(found[number]) is not None:
                    if self._number_of(found[number]) not in sharded:
                        api.load_full_state_dict(found[number], read_weights(Path(where), number), strict)
                    del found[number]

        others = {} if strict else {"strict": False}  # for models that are not sharded
        self._refuse_load(input_dir, kwargs)
        handle = self.register_load_state_pre_hook(load_models)
        try:
            with self._without_optimizers() as optimizers, self._beside(input_dir):
                super().load_state(input_dir, *args, **others, **kwargs)
        finally:
            handle.remove()
        for number, optimizer in enumerate(optimizers if not sharded else ()):
            optimizer_state.load(optimizer.optimizer, self._engines(), _optimizer_file(folder[0], number))
        if naming and self._engines():
            self._number_on()

    def _number_on(self) -> None:
        following = retention.following(Path(self.project_dir, "checkpoints"))
        told: list[Any] = self._engines()[0].control.gather_objects(following, "load_state: the next number")
        self.project_configuration.iteration = max(self.project_configuration.iteration, *told)

    def _refuse_load(self, input_dir: str | None, options: dict[str, Any]) -> None:
        """Raise ValueError for options that loading sharded models has no use for, and for a call before `prepare`."""
        unknown = options.keys() - {"load_kwargs", "map_location"}
        if self._engines() and len(self._engines()) == len(self._models) and unknown:
            raise ValueError(
                f"load_state: a sharded model is loaded without {', '.join(sorted(unknown))}; leave it out"
            )
        if input_dir is not None and not self._models and is_ours(sharded_folder(Path(input_dir).expanduser(), 0)):
            raise ValueError(f"load_state: no model is prepared, and {input_dir} holds one: call it after `prepare`")

    def _beside(self, input_dir: str | None) -> AbstractContextManager[None]:
        """Return what loads the schedulers and scaler that another engine keeps in files of its own."""
        folder = Path(input_dir).expanduser() if input_dir is not None and self._engines() else None
        if folder is None or not folder.is_dir() or self._folder_of(folder, 0) != folder:
            return nullcontext()
        return foreign_resume.kept_by_engine(self, folder)

    def _newest_complete(self) -> str | None:
        """Return the newest complete checkpoint; None, for accelerate to choose, if there is none."""
        found = retention.newest(Path(self.project_dir, "checkpoints"))
        return None if found.path is None else log_skipped("load_state", found)

    def _load_sharded(
        self, wanted: list[torch.nn.Module], where: Path, optimizers: list[Any], strict: bool
    ) -> list[int]:
        """Load models that lie in `where` by rows, weights of `wanted` ones only; return their numbers."""
        found = []
        for engine in self._engines()[:1]:
            with together(engine, "load_state: files"):
                self._refuse_other_files(where)
        for number, model in enumerate(self._models):
            folder = self._folder_of(where, number)
            if models.engine_of(model) is not None and folder is not None:
                weights = any(each is model for each in wanted)
                which = number if len(self._models) > 1 and folder == where else None
                inner = models.inner(model)
                running.load(inner, optimizers, folder, weights=weights, number=which, beside=True, strict=strict)
                found.append(number)
        return found

    def _refuse_other_files(self, where: Path) -> None:
        """Refuse files of accelerate that another save has put there."""
        folder = commit.standing(sharded_folder(where, 0))
        if not is_ours(folder) or not self.is_local_main_process:
            return
        with ShardedSource(folder) as source:
            problem = files_problem(where, source.description.client_state, missing=False)
        if problem is not None:
            raise CheckpointError(f"nothing was loaded: {problem}")

    def _folder_of(self, where: Path, number: int) -> Path | None:
        """Return where model `number` lies in our sharded format, or in another engine's; None: as whole files."""
        folder = commit.standing(sharded_folder(where, number))
        if is_ours(folder):
            return folder
        if number == 0 and is_ours(where):  # what `ourshard convert` makes
            return where
        return None if _optimizer_file(where, 0).exists() or not is_foreign(where) else where

    def _number_of(self, model: torch.nn.Module) -> int:
        return next(number for number, each in enumerate(self._models) if each is model)

    def end_training(self) -> None:
        """End as accelerate does, which destroys the process group, after the last background save."""
        wait_for_save()
        stopping.finish()
        let_go_of_graphs()
        super().end_training()

    def _engines(self) -> list[api.Engine]:
        found = [models.engine_of(model) for model in self._models]
        return [engine for engine in found if engine is not None]


def sharded_folder(folder: Path, number: int) -> Path:
    """Return where model `number` lies in a folder of `save_state`."""
    return folder / of_model(SHARDED_FOLDER, number)


def log_skipped(who: str, newest: commit.Newest) -> str | None:
    """Log each checkpoint that was passed over, with the reason; return the path of the one that was found."""
    for skipped in newest.skipped:
        logger.warning("%s: skipped %s", who, skipped)
    return None if newest.path is None else str(newest.path)


def _whole_state(model: torch.nn.Module, *, keep: bool) -> dict[str, Any]:
    dtype = pretrained.save_dtype(model)
    engine = api.engine_of(model)
    if engine is None or is_here(model, dtype):
        return part_state(model, "get_state_dict", dtype=dtype, keep=keep)
    return api.full_state_dict(model, dtype=dtype, rank0_only=not keep)


def _optimizer_file(folder: str | os.PathLike[str], number: int) -> Path:
    return Path(folder) / of_model(OPTIMIZER_FILE, number, ".bin")


def read_weights(folder: Path, number: int) -> dict[str, torch.Tensor]:
    """Read the whole weights of model `number` from a folder of `save_state`, without holding a file twice."""
    safe = folder / of_model(SAFE_MODEL_NAME, number, ".safetensors")
    pickled = folder / of_model(MODEL_NAME, number, ".bin")
    if safe.exists():
        from safetensors.torch import load_file

        return load_file(safe)
    if not pickled.exists():
        raise ValueError(
            f"load_state: {folder} has neither {safe.name} nor {pickled.name}; was it written by save_state?"
        )
    state: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", mmap=True, weights_only=True)
    return state
