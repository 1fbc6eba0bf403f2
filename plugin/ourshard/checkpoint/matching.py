"""Compare what a checkpoint holds with what is to be loaded, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ourshard.runtime.wording import shorten

from .foreign.ties import equal_rows
from .portions import Buffer, Portion
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


def key_of(source: Source, held: Portion | Buffer) -> TensorKey | None:
    """Return where a checkpoint has a parameter or buffer of a running model, under any of its names."""
    return next(iter(_keys_of(source, held)), None)


def _keys_of(source: Source, held: Portion | Buffer) -> list[TensorKey]:
    """Return all places where a checkpoint has it, that of its first name there first."""
    keys = (source.weight_key(name) for name in (held.name, *held.aliases))
    return list(dict.fromkeys(key for key in keys if key is not None))


def names_there(source: Source, portions: Iterable[Portion]) -> dict[str, str]:
    """Return name here -> name there of the parameters that the checkpoint has; a tie may have another owner there."""
    keys = {portion.name: key_of(source, portion) for portion in portions}
    return {name: key.name for name, key in keys.items() if key is not None}


def tied_here(source: Source, held: Iterable[Portion | Buffer]) -> dict[TensorKey, bool]:
    """Return the keys of what is one tensor here and lies there once more -> whether sampled rows are the same.

    FSDP and DCP save each name of a tied weight, and of one that is not trained nothing there tells that it is tied.
    """
    found = {}
    for first, *others in filter(None, (_keys_of(source, each) for each in held)):
        found.update({key: equal_rows(source, key, first) for key in others})
    return found
