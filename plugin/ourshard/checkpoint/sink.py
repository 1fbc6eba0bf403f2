"""What every writer of a checkpoint format is, and the folder it writes into.

A writer is a subclass of `Sink`, registered by name (`registry.py`; formats of others: `foreign/__init__.py`). It gets
a `Source` whose names, dtypes and contents are final (filters, renames and casts are done by `convert` in a view over
the source), and a `Workspace`: a temporary folder that `convert` flushes and renames when `write` has returned. Rules:

- Only `Workspace` touches the disk, so that a name cannot lead outside, a crash leaves nothing half-written under the
  final name, and a finished file is not written again when the conversion is run anew.
- Tensors are read by `source.read` or `source.read_blocks` within `with workspace.reserve(nbytes)`, so that all
  workers together stay within the budget; a request larger than the budget waits until it is alone.
- What the format cannot hold is named by `losses`; `convert` tells the user before it writes.

`Workspace` (workspace.py) has: `finished(name)`, `create(name)` (a context manager that gives a stream with
`write(bytes-like)` and `tell()`; torch.save can write into it), `write_bytes(name, data)`, `copy(name, path)`,
`reserve(nbytes)`, `budget` (bytes), `map(function, items)` (over the workers; the first error is raised) and
`report(nbytes)` (progress). Names are relative with forward slashes; folders are made as needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ourshard.runtime.wording import counted

from .source import Source

if TYPE_CHECKING:
    from .workspace import Workspace


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How to write; what is not None must mean something for the format: `Sink.refused_options`."""

    max_shard_size: int | None = None  # bytes in a file of weights; None: one file
    world_size: int | None = None  # ranks to cut the files for; None: the source's, or 1

    def __post_init__(self) -> None:
        for name in ("max_shard_size", "world_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it has to be 1 or more")


class Sink(ABC):
    """A writer of one format."""

    format: ClassVar[str]  # name in the registry and in `--to`
    summary: ClassVar[str]  # one line for `--help`: what the result is and who reads it
    refused_options: ClassVar[Mapping[str, str]] = {}  # of `SinkOptions`: name -> why it has no meaning, what to use

    def __init__(self, options: SinkOptions) -> None:
        for name, reason in self.refused_options.items():
            if getattr(options, name) is not None:
                raise ValueError(f"{name} has no meaning for {self.format}: {reason}")
        self.options = options

    @classmethod
    @abstractmethod
    def can_hold(cls, kind: str) -> bool:
        """Tell whether tensors of this kind have a place in the format."""

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Return one sentence for each thing of the source that this format has no place for."""
        kinds = Counter(key.kind for key in source.tensors if not cls.can_hold(key.kind))
        extra = ("the extra state of modules",) if source.description.extra_state else ()
        return (*(f"{counted(count, 'tensor')} of kind {kind!r}" for kind, count in sorted(kinds.items())), *extra)

    @abstractmethod
    def write(self, source: Source, workspace: Workspace) -> None:
        """Write all that the format can hold. Leaves kinds that it cannot hold alone; never loads the whole model."""
