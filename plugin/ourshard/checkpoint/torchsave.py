"""Files of torch.save in the old layout: `pytorch_model.bin`, and the optimizer as torch numbers it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ourshard.runtime.wording import shorten

from .companions import companions
from .foreign.draft import Draft, ForeignSource
from .foreign.names import canonical_keys
from .foreign.weights import find_weights, read_weights
from .huggingface_sink import MAX_SHARD_SIZE, file_names, index_of, split, write_companions
from .numbered import Models, numbered, of_model
from .sink import Sink
from .source import BUFFER, PARAM, Source, TensorInfo, TensorKey
from .torch_archive import Archive
from .workspace import Workspace

MODEL = "pytorch_model.bin"
OPTIMIZER = "optimizer.bin"
SCHEDULER = "scheduler.bin"
SCALER = "scaler.pt"

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class TorchSaveSource(ForeignSource):
    """Weights in files of torch.save, read without unpickling. Tied names show the same storage."""

    format = "torch"
    looks_for = f"{MODEL}, {MODEL}.index.json, or a file {'/'.join(_SUFFIXES)} that holds a state_dict"

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of files, as accelerate's `save_state` gives them."""
        models = numbered(found.parent, r"pytorch_model(?:_(?P<n>\d+))?\.bin")
        return models if any(found.name in names for names in models.values()) else {}

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        if self.models_in(path):
            path = path.with_name(of_model("pytorch_model", model, ".bin"))
        weights = read_weights(path)
        files = companions(path.parent) if path.name.startswith(MODEL) else {}
        tensors = canonical_keys(weights.tensors, str(path), parameter_order or ())
        left = [f"what lies beside the weights in {path.name}: {shorten(weights.left)}"] if weights.left else []
        self.publish(Draft(model=dict(tensors), ties=weights.ties or None, files=files, losses=left))

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the file or index to read."""
        if path.is_file():
            return path if path.suffix in _SUFFIXES or path.name == f"{MODEL}.index.json" else None
        found = find_weights(path, ("pytorch_model",))
        return found if found is not None and ".bin" in found.name else None


class TorchSaveSink(Sink):
    """What `torch.save(model.state_dict())` and `torch.save(optimizer.state_dict())` would have written."""

    format = "torch"
    summary = "torch.save files: pytorch_model.bin (or several with an index), optimizer.bin, scheduler.bin"
    refused_options: ClassVar[Mapping[str, str]] = {"world_size": "use max_shard_size"}

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold weights, buffers and the optimizer's state."""
        return TensorKey(kind, "").is_state or kind in (PARAM, BUFFER)

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Name what has no file."""
        client = ("the client state",) if source.description.client_state else ()
        unnamed = (
            any(TensorKey(key.kind, "").is_state for key in source.tensors) and not source.description.param_groups
        )
        nameless = ("the optimizer's state: its parameter groups are not known",) if unnamed else ()
        return (*super().losses(source), *client, *nameless)

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write the weights, the optimizer if its groups are known, and the small files."""
        infos = [info for key, info in source.tensors.items() if key.kind in (PARAM, BUFFER)]
        files = split(infos, self.options.max_shard_size or MAX_SHARD_SIZE)
        names = file_names(len(files), MODEL)

        def write_file(name: str, own: Sequence[TensorInfo]) -> None:
            archive = Archive(source)
            archive.write(workspace, name, _state_dict(source, archive, own))

        workspace.map(lambda item: write_file(*item), zip(names, files, strict=True))
        if len(files) > 1:
            workspace.write_bytes(f"{MODEL}.index.json", index_of(names, files, source.description.ties))
        if source.description.param_groups:
            archive = Archive(source)
            archive.write(workspace, OPTIMIZER, optimizer_state(source, archive))
        for name, value in ((SCHEDULER, source.description.scheduler), (SCALER, source.description.scaler)):
            if value:
                workspace.write_bytes(name, _saved(value))
        write_companions(workspace, source, infos)


def optimizer_state(source: Source, archive: Archive) -> dict[str, Any]:
    """Return an optimizer's state_dict: numbered parameters, with their names in each group's `param_names`."""
    kinds: dict[str, list[str]] = {}
    for key in source.tensors:
        if key.is_state:
            kinds.setdefault(key.name, []).append(key.kind)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group in source.description.param_groups:
        members = list(group["params"])
        for offset, name in enumerate(members):
            values = {kind: archive.tensor(TensorKey(kind, name)) for kind in kinds.get(name, ())}
            values.update(source.description.param_state.get(name, {}))
            if values:
                state[number + offset] = values
        numbers = list(range(number, number + len(members)))
        groups.append({**group, "params": numbers, "param_names": members})
        number += len(members)
    return {"state": state, "param_groups": groups}


def _state_dict(source: Source, archive: Archive, infos: Sequence[TensorInfo]) -> dict[str, Any]:
    """Return name -> stand-in, each alias after its owner with the same storage."""
    aliases: dict[str, list[str]] = {}
    for alias, owner in source.description.ties.items():
        aliases.setdefault(owner, []).append(alias)
    content: dict[str, Any] = {}
    for info in infos:
        for name in (info.key.name, *aliases.get(info.key.name, ())):
            content[name] = archive.tensor(info.key)
    return content


def _saved(value: Any) -> bytes:
    """Return what torch.save writes. It hides errors of the disk, so that it does not write there itself."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
