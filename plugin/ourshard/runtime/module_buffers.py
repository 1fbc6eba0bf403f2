"""Buffers that forwards update, as the statistics of a batch norm: the same on all ranks, as DDP keeps them.

Note [Updated buffers]
Each rank updates them by its own batch. In the exchange that settles gradients, at the end of each backward that
syncs, ranks tell each other which buffers have changed; all take the values of the lowest rank that changed any, which
is rank 0 unless it has run out of batches. Only what is saved counts: buffers that are not persistent are caches, which
ranks make by themselves (positions up to the longest sequence that one has seen). A rank whose buffer has got another
shape takes part, and keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ourshard.runtime.collectives import Collectives
from ourshard.runtime.control import Control
from ourshard.runtime.mesh import Axis


@dataclass(slots=True)
class _Watched:
    """A persistent buffer as all ranks had it when the model was sharded, and as it was last seen."""

    name: str
    module: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype
    seen: torch.Tensor
    versions: tuple[int, int]  # of `seen`, and of the counter of a batch norm's forwards

    @property
    def now(self) -> torch.Tensor | None:
        """Return the buffer, or None where it is gone or has got another form."""
        value = self.module._buffers.get(self.attribute)
        same = value is not None and (value.shape, value.dtype) == (self.shape, self.dtype)
        return value if same else None

    def has_changed(self) -> bool:
        value = self.now
        if value is None:
            return False
        if self._is_written_unseen():
            return True
        return value is not self.seen or _versions(self.module, value) != self.versions

    def _is_written_unseen(self) -> bool:
        """Say whether kernels may have written without a new version, and no count of forwards tells."""
        norm = self.module
        if not isinstance(norm, _NormBase) or not norm.track_running_stats or not norm.training:
            return False
        return type(norm).forward not in _COUNTING or norm.num_batches_tracked is None

    def take(self, value: torch.Tensor) -> None:
        """Take the values of another rank.

        A graph may have saved the buffer, and a backward of it may follow (of a second loss, or of the same again).
        Of a batch norm's none reads them: they change without a new version, as in its forward.
        """
        buffer = self.now
        if buffer is not None:
            (buffer.data if isinstance(self.module, _NormBase) else buffer).copy_(value.view(self.shape))

    def look(self) -> None:
        """Remember the buffer as it is."""
        value = self.now
        if value is not None:
            self.seen, self.versions = value, _versions(self.module, value)


_COUNTING = (_BatchNorm.forward, nn.SyncBatchNorm.forward)  # they add to `num_batches_tracked`


def _versions(module: nn.Module, value: torch.Tensor) -> tuple[int, int]:
    counter = module._buffers.get("num_batches_tracked")
    return version_of(value), 0 if counter is None else version_of(counter)


def version_of(value: torch.Tensor) -> int:
    """Return autograd's count of writes to a tensor; 0 for one of inference, which has none."""
    return 0 if value.is_inference() else value._version


class UpdatedBuffers:
    """The persistent buffers of a model, and which of them changed: Note [Updated buffers]."""

    def __init__(self, control: Control, collectives: Collectives, world: Axis) -> None:
        self._control = control
        self._collectives = collectives
        self._world = world
        self._watched: list[_Watched] = []

    def watch(self, model: nn.Module) -> None:
        """Watch the buffers of `model`, which all ranks have alike now."""
        if self._world.size == 1:
            return
        for name, module in model.named_modules():
            for attribute, value in module._buffers.items():
                if value is None or attribute in module._non_persistent_buffers_set or not value.numel():
                    continue
                label = f"{name}.{attribute}" if name else attribute
                form = (value.shape, value.dtype, value, _versions(module, value))
                self._watched.append(_Watched(label, module, attribute, *form))

    def take_loaded(self, loaded: Iterable[torch.Tensor]) -> None:
        """Remember buffers that were written to on all ranks alike: no forward has changed them."""
        known = {id(buffer) for buffer in loaded}
        for watched in self._watched:
            if id(watched.now) in known:
                watched.look()

    def let_differ(self) -> None:
        """Leave each rank what it has, as DDP does without `broadcast_buffers`."""
        self._watched.clear()

    def flags(self) -> list[bool]:
        """Return which buffers this rank has changed, and whether it is rank 0 and changed any."""
        changed = [watched.has_changed() for watched in self._watched]
        return [*changed, self._world.rank == 0 and any(changed)] if changed else []

    @torch.no_grad()
    def share(self, known: list[bool]) -> None:
        """Give all ranks the buffers that any has changed; `known` are the flags of all ranks together. Collective."""
        due = [watched for watched, changed in zip(self._watched, known, strict=False) if changed]
        if not due:
            return
        source = 0 if known[-1] else self._lowest()
        by_form: dict[tuple[torch.dtype, torch.device], list[_Watched]] = {}
        for watched in due:
            by_form.setdefault((watched.dtype, watched.seen.device), []).append(watched)
        for group in by_form.values():
            parts = [watched.seen if watched.now is None else watched.now for watched in group]
            flat = torch.cat([part.reshape(-1) for part in parts])
            self._collectives.broadcast(flat, self._world, f"buffer {group[0].name} and others", source)
            if self._world.rank != source:
                _take(group, flat)
        for watched in due:
            watched.look()

    def _lowest(self) -> int:
        """Return the lowest rank that changed a buffer. Collective."""
        mine = any(watched.has_changed() for watched in self._watched)
        flags = [mine and rank == self._world.rank for rank in range(self._world.size)]
        return self._control.any_of(flags, "whose buffers are taken").index(True)


def _take(group: list[_Watched], flat: torch.Tensor) -> None:
    start = 0
    for watched in group:
        stop = start + watched.shape.numel()
        watched.take(flat[start:stop])
        start = stop
