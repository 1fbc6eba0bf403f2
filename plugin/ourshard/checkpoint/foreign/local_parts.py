"""Join what each rank has pickled of its own: DTensors (FSDP2) and ShardedTensors (FSDP1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..source import CheckpointError
from .chunked import Chunk, ChunkedTensor
from .classes import PickledTensor
from .plaindata import materialize
from .stored import Readable
from .torchfile import TorchFile
from .unpickle import Record


class RankFiles:
    """The files of all ranks, in order of rank, each with the same structure."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [TorchFile(path) for path in paths]
        self.contents = [file.load() for file in self.files]
        for file, content in zip(self.files, self.contents, strict=True):
            if not isinstance(content, dict):
                raise CheckpointError(f"{file.where}: holds no state_dict")

    def tensors(self) -> dict[str, Readable]:
        """Return the tensors of a model's state_dict."""
        found = {}
        for name in self.contents[0]:
            value = self._joined(name, [content.get(name) for content in self.contents])
            if isinstance(value, Readable):
                found[str(name)] = value
        return found

    def optimizer(self) -> dict[str, Any]:
        """Return an optimizer's state_dict with whole tensors; groups are rank 0's."""
        states = [content.get("state") for content in self.contents]
        if not all(isinstance(state, dict) for state in states):
            raise CheckpointError(f"{self.files[0].where}: holds no state_dict of an optimizer")
        state: dict[Any, dict[str, Any]] = {}
        for owner, values in self._owners(states):
            state[owner] = {
                key: self._joined(f"{owner} ({key})", [part.get(key) if part else None for part in values])
                for key in next(part for part in values if part)
            }
        return {"state": state, "param_groups": materialize(self.files[0], self.contents[0].get("param_groups"))}

    def _owners(self, states: Sequence[Mapping[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
        for owner in dict.fromkeys(owner for state in states for owner in state):
            values = [state.get(owner) for state in states]
            if any(value is not None and not isinstance(value, dict) for value in values):
                raise CheckpointError(f"{self.files[0].where}: the state of {owner!r} is no dict")
            if any(values):
                yield owner, values

    def _joined(self, name: str, parts: list[Any]) -> Any:
        """Return a whole tensor or a plain value; what is the same on all ranks is taken from the first that has it."""
        first = next((rank for rank, part in enumerate(parts) if part is not None), 0)
        value, file = parts[first], self.files[first]
        if isinstance(value, PickledTensor):
            return file.stored(value)
        if isinstance(value, Record) and value.kind in _JOINS:
            if any(not isinstance(part, Record) or part.kind != value.kind for part in parts):
                raise CheckpointError(f"{name}: is not a {value.kind} on every rank")
            return _JOINS[value.kind](name, parts, self.files)
        return materialize(file, value)


def _join_dtensors(name: str, parts: Sequence[Record], files: Sequence[TorchFile]) -> Readable:
    """Join DTensors that are cut along one dimension over one dimension of the mesh, and alike over the others."""
    shape, dtype = parts[0]["shape"], parts[0]["dtype"]
    pieces: dict[int, tuple[PickledTensor, TorchFile]] = {}
    dim = 0
    for part, file in zip(parts, files, strict=True):
        spec, local = part["_spec"], part["_local_tensor"]
        if (part["shape"], part["dtype"]) != (shape, dtype) or not isinstance(local, PickledTensor):
            raise CheckpointError(f"{file.where}: {name} differs in shape or dtype from the other ranks")
        kinds = [(place.kind, place.get("dim")) for place in spec["placements"]]
        cut = [axis for axis, (kind, _) in enumerate(kinds) if kind != "Replicate"]
        if len(cut) > 1 or any(kinds[axis][0] != "Shard" for axis in cut):
            raise CheckpointError(f"{name}: is cut over several dimensions of a mesh ({kinds}), which is not read")
        place = 0
        if cut:
            dim, place = int(kinds[cut[0]][1] or 0), int(spec["mesh"]["_coordinate_on_dim"][cut[0]])
        pieces.setdefault(place, (local, file))
    chunks, begin = [], 0
    for place in sorted(pieces):
        local, file = pieces[place]
        if local.numel:
            offsets = tuple(begin if axis == dim else 0 for axis in range(len(shape)))
            chunks.append(Chunk(offsets, local.shape, partial(file.stored, local)))
            begin += local.shape[dim] if shape else 0
    return ChunkedTensor(shape, dtype, chunks, name)


def _join_sharded(name: str, parts: Sequence[Record], files: Sequence[TorchFile]) -> Readable:
    """Join ShardedTensors, whose pieces say where they belong."""
    whole = parts[0]["metadata"]
    shape = tuple(whole["size"])
    chunks, dtype = [], None
    for part, file in zip(parts, files, strict=True):
        for shard in part["local_shards"]:
            tensor, place = shard["tensor"], shard["metadata"]
            if not isinstance(tensor, PickledTensor):
                raise CheckpointError(f"{file.where}: {name} has a piece that is no tensor")
            dtype = dtype or tensor.dtype
            if tensor.numel:
                offsets, sizes = tuple(place["shard_offsets"]), tuple(place["shard_sizes"])
                chunks.append(Chunk(offsets, sizes, partial(file.stored, tensor)))
    if dtype is None:
        raise CheckpointError(f"{name}: no rank has a piece of it")
    return ChunkedTensor(shape, dtype, chunks, name)


_JOINS = {"DTensor": _join_dtensors, "ShardedTensor": _join_sharded}
