"""Compare what a checkpoint holds with what is to be loaded, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ourshard.runtime.wording import shorten

from .source import PARAM, CheckpointError, Source, TensorKey

_SHOWN = 10  # names of each kind in a message


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What does not fit. `shapes`: key -> (shape in the checkpoint, shape wanted)."""

    missing: tuple[TensorKey, ...]
    unexpected: tuple[TensorKey, ...]
    shapes: Mapping[TensorKey, tuple[tuple[int, ...], tuple[int, ...]]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def text(self) -> str:
        """Return the lists as text, each cut off after ten names."""
        shapes = [f"{key}: {have} in the checkpoint, {want} wanted" for key, (have, want) in self.shapes.items()]
        lists = (
            ("missing in the checkpoint", list(map(str, self.missing))),
            ("in the checkpoint only", list(map(str, self.unexpected))),
            ("of another shape", shapes),
        )
        return "\n".join(f"  {what}: {shorten(items, _SHOWN)}" for what, items in lists if items)


def mismatch(source: Source, wanted: Mapping[TensorKey, tuple[int, ...]]) -> Mismatch:
    """Return what differs between a checkpoint and the shapes that are to be loaded. Tied names count as their owner.

    State of the optimizer that is wanted and absent is missing; kinds that nobody asks for are not unexpected.
    """
    ties = source.description.ties
    owned = {key._replace(name=ties.get(key.name, key.name)) if key.kind == PARAM else key: key for key in wanted}
    kinds = {key.kind for key in wanted}
    return Mismatch(
        missing=tuple(key for owner, key in owned.items() if owner not in source.tensors),
        unexpected=tuple(key for key in source.tensors if key.kind in kinds and key not in owned),
        shapes={
            key: (source.tensors[owner].shape, tuple(wanted[key]))
            for owner, key in owned.items()
            if owner in source.tensors and source.tensors[owner].shape != tuple(wanted[key])
        },
    )


def require(source: Source, wanted: Mapping[TensorKey, tuple[int, ...]], *, allow_unexpected: bool = False) -> None:
    """Raise CheckpointError listing all that is missing, unexpected or of another shape; read no tensor."""
    found = mismatch(source, wanted)
    if found.missing or found.shapes or (found.unexpected and not allow_unexpected):
        raise CheckpointError(f"{source.path} does not fit what is to be loaded:\n{found.text()}")
