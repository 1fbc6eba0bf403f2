"""Saving and loading through an `Accelerator` whose models are sharded.

Whole weights are written as accelerate writes them, so that every tool that reads its folders reads ours; optimizers
are written whole too, by parameter name (`optimizer_state.py`), and load on any number of ranks and at any stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME

from ourshard.integrations import models, optimizer_state
from ourshard.runtime import api

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object

OPTIMIZER_FILE = "ourshard_optimizer"


class SavingMixin(_Base):
    """Whole state dicts, and the folders of `save_state`."""

    _for_files = False  # what is gathered now is for files: only the writing ranks keep it

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole parameters and buffers on the CPU, on every rank, as under DDP. Collective.

        Tied names share one tensor. The dtype is the one the model was loaded in, or `checkpoint.save_dtype`.
        """
        engine = models.engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        name = engine.config.checkpoint.save_dtype
        only_rank0 = self._for_files and not self.project_configuration.save_on_each_node
        return api.full_state_dict(model, dtype=getattr(torch, name) if name else None, rank0_only=only_rank0)

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
        """Write the whole model as accelerate does; call it on all ranks, rank 0 writes."""
        with self._gathering_for_files():
            super().save_model(model, save_directory, *args, **kwargs)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Write models, optimizers, schedulers, RNG and everything else that `load_state` reads. Collective."""
        with self._without_optimizers() as optimizers, self._gathering_for_files():
            location = super().save_state(output_dir, *args, **kwargs)
        for number, optimizer in enumerate(optimizers):
            whole = optimizer_state.gather(optimizer.optimizer, self._engines(), keep=self._writes_files)
            self.save(whole, _optimizer_file(location, number))
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` wrote, on any number of ranks. Collective."""
        folder: list[Path] = []

        def load_models(found: list[torch.nn.Module], where: str) -> None:
            """Load what the user's hooks left over; stock accelerate would load rank 0's file into shards."""
            folder.append(Path(where))
            for number in reversed(range(len(found))):
                if models.engine_of(found[number]) is not None:
                    api.load_full_state_dict(found[number], read_weights(Path(where), number))
                    del found[number]

        handle = self.register_load_state_pre_hook(load_models)
        try:
            with self._without_optimizers() as optimizers:
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        for number, optimizer in enumerate(optimizers):
            optimizer_state.load(optimizer.optimizer, self._engines(), _optimizer_file(folder[0], number))

    def _engines(self) -> list[api.Engine]:
        found = [models.engine_of(model) for model in self._models]
        return [engine for engine in found if engine is not None]


def _optimizer_file(folder: str | os.PathLike[str], number: int) -> Path:
    return Path(folder) / (f"{OPTIMIZER_FILE}.bin" if number == 0 else f"{OPTIMIZER_FILE}_{number}.bin")


def read_weights(folder: Path, number: int) -> dict[str, torch.Tensor]:
    """Read the whole weights of model `number` from a folder of `save_state`, without holding a file twice."""
    ending = f"_{number}" if number else ""
    safe, pickled = folder / f"{SAFE_MODEL_NAME}{ending}.safetensors", folder / f"{MODEL_NAME}{ending}.bin"
    if safe.exists():
        from safetensors.torch import load_file

        return load_file(safe)
    if not pickled.exists():
        raise ValueError(
            f"load_state: {folder} has neither {safe.name} nor {pickled.name}; was it written by save_state?"
        )
    state: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", mmap=True, weights_only=True)
    return state
