"""The formats by name. Modules are imported on first use, so that asking for help costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from .sink import Sink
from .source import Source

# The order is the order of detection: formats with a mark of their own first, bare weights last.
OWN_READERS_FIRST = ("ourshard.checkpoint.sharded:ShardedSource",)
OWN_READERS_LAST = (
    "ourshard.checkpoint.huggingface:SafetensorsSource",
    "ourshard.checkpoint.torchsave:TorchSaveSource",
)
OWN_WRITERS = {
    "ourshard": "ourshard.checkpoint.sharded_sink:ShardedSink",
    "safetensors": "ourshard.checkpoint.huggingface_sink:SafetensorsSink",
    "peft": "ourshard.checkpoint.peft_sink:PeftSink",
    "torch": "ourshard.checkpoint.torchsave:TorchSaveSink",
}


def readers() -> Iterator[type[Source]]:
    """Yield the readers in the order of detection."""
    from . import foreign

    for where in (*OWN_READERS_FIRST, *foreign.READERS, *OWN_READERS_LAST):
        yield load_class(where)


def writer(name: str) -> type[Sink]:
    """Return the writer of a format; raise ValueError naming the known ones."""
    known = writer_names()
    if name not in known:
        raise ValueError(f"cannot write format {name!r}; known: {', '.join(sorted(known))}")
    return load_class(known[name])


def writer_names() -> dict[str, str]:
    """Return the writers: name -> "module:class"."""
    from . import foreign

    return {**OWN_WRITERS, **foreign.WRITERS}


def load_class(where: str) -> type[Any]:
    """Import a reader or writer, given as "module:class"."""
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)
