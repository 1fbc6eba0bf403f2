"""Sharded safetensors of torch's HuggingFaceStorageWriter (save_pretrained with distributed_checkpoint=True).

Each rank has a file; its metadata says where its pieces belong. There is no index: neither the number of files nor
the whole shapes are written anywhere, so a lost last file shows only where something else knows the shape (the
optimizer's state).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ourshard.runtime.wording import counted

from ..safetensors_file import read_header
from ..source import CheckpointError
from .chunked import Chunk, ChunkedTensor
from .dcp import DcpFolder, is_dcp_folder
from .dcp_source import Parts
from .draft import Draft, ForeignSource
from .runfiles import add_run_files
from .stored import Bytes, Readable, contiguous

_SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_SHARDED = "sharded"  # where torch puts the shards if it also writes whole files
_CUSTOM = "DCP_SHARDING_INFO"
_OURS = "ourshard"  # what our own shards say of themselves: read here where their manifest is lost


class HfShardsSource(ForeignSource):
    """A folder of sharded safetensors, with an optimizer's DCP folder beside them if there is one."""

    format: ClassVar[str] = "hf-shards"
    looks_for: ClassVar[str] = "shard-00001-model-00001-of-00001.safetensors (torch's HuggingFaceStorageWriter)"

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder of the shards."""
        if not path.is_dir():
            return None
        if any(_SHARD.fullmatch(p.name) for p in path.iterdir()):
            return path
        whole = any(p.name.startswith("model") and p.suffix == ".safetensors" for p in path.iterdir())
        return None if whole or not (path / _SHARDED).is_dir() else cls.find(path / _SHARDED)

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None) -> None:
        super().__init__(path, parameter_order)
        draft, parts = Draft(), Parts()
        model, draft.world_size = _read_shards(path)
        optimizers = [p for p in sorted(path.iterdir()) if p.name.startswith("optim") and is_dcp_folder(p)]
        for folder in optimizers[:1]:
            parts.add(DcpFolder(folder))
        parts.model = {(): dict(model)}
        parts.into(draft, path, parameter_order)
        add_run_files(draft, path)
        self.publish(draft)


def _read_shards(folder: Path) -> tuple[dict[str, Readable], int]:
    """Return the tensors and the number of ranks that wrote them."""
    files = {path: match for path in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(path.name))}
    ranks = sorted({int(match[1]) for match in files.values()})
    if ranks != list(range(1, len(ranks) + 1)):
        lost = next(rank for rank in range(1, ranks[-1] + 1) if rank not in ranks)
        raise CheckpointError(f"{folder}: shard-{lost:05d} is missing")
    found: dict[str, dict[tuple[int, ...], tuple[Any, Path]]] = {}
    ours: list[dict[str, Any]] = []
    for path in files:
        header = read_header(path)
        if _OURS in header.metadata:
            ours.append(_own_words(path, header.metadata[_OURS]))
        offsets = _offsets(path, header.metadata)
        for entry in header.entries:
            place = offsets.get(entry.name, (0,) * len(entry.shape))
            if len(place) != len(entry.shape):
                raise CheckpointError(f"{path}: {entry.name} has offsets {place} and shape {entry.shape}")
            if 0 not in entry.shape or entry.name not in found:
                found.setdefault(entry.name, {}).setdefault(place, (entry, path))
    joined = {name: _join(name, pieces, folder) for name, pieces in found.items()}
    if not ours:
        return joined, len(ranks)
    return joined, _refuse_lost(folder, ours, joined)


def _own_words(path: Path, text: str) -> dict[str, Any]:
    try:
        words = json.loads(text)
        return {"rank": int(words["rank"]), "world_size": int(words["world_size"]), "shapes": dict(words["shapes"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: {_OURS} is damaged: {error}") from error


def _refuse_lost(folder: Path, ours: list[dict[str, Any]], joined: dict[str, Readable]) -> int:
    """Refuse what is left of a checkpoint of ours unless it is the whole; return the ranks that wrote it.

    A rank without rows has no file, so its absence can't be told from a loss: without the manifest it is one.
    """
    world = ours[0]["world_size"]
    lost = sorted(set(range(world)) - {words["rank"] for words in ours})
    if lost:
        raise CheckpointError(
            f"{folder} has no ourshard.json, and of {counted(world, 'shard')} that it had shard-{lost[0] + 1:05d} is "
            "missing: the save did not finish, or files were lost. Take an older checkpoint."
        )
    for name, shape in ((name, shape) for words in ours for name, shape in words["shapes"].items()):
        if list(joined[name].shape) != list(shape):
            raise CheckpointError(
                f"{folder} has no ourshard.json, and of {name} only {tuple(joined[name].shape)} of {tuple(shape)}."
            )
    return world


def _offsets(path: Path, metadata: Any) -> dict[str, tuple[int, ...]]:
    """Return where the pieces of a file belong in their tensors."""
    try:
        table = json.loads(metadata.get(_CUSTOM, "{}"))
        found = {name: tuple(value["saved_offsets"]) for name, value in table.items()}
        if any(type(number) is not int or number < 0 for place in found.values() for number in place):
            raise ValueError("an offset is no number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {_CUSTOM} is damaged: {error}") from error
    return found


def _join(name: str, pieces: dict[tuple[int, ...], tuple[Any, Path]], folder: Path) -> Readable:
    dims = len(next(iter(pieces)))
    shape = tuple(max(place[dim] + entry.shape[dim] for place, (entry, _) in pieces.items()) for dim in range(dims))
    dtypes = {entry.dtype for entry, _ in pieces.values()}
    if len(dtypes) > 1:
        raise CheckpointError(f"{folder}: the pieces of {name} have different dtypes")
    chunks = []
    for place, (entry, path) in pieces.items():
        if 0 not in entry.shape:
            content = Bytes(path, entry.begin, entry.nbytes, None, f"{path}: {name}")
            chunks.append(Chunk(place, entry.shape, partial(contiguous, entry.shape, entry.dtype, content)))
    return ChunkedTensor(shape, dtypes.pop(), chunks, f"{folder}: {name}")
