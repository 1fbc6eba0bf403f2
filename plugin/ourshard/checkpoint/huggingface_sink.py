"""Write safetensors as Transformers reads them: one file or several with an index, and the files that go along."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from .companions import is_for_model
from .huggingface import OWN_METADATA, SINGLE
from .safetensors_file import lay_out
from .sink import Sink
from .source import BUFFER, PARAM, CheckpointError, Source, TensorInfo
from .transfer import FilePlan, whole, write_files
from .workspace import Workspace

MAX_SHARD_SIZE = 50_000_000_000  # bytes, as Transformers has it


class SafetensorsSink(Sink):
    """Weights and buffers, each tied tensor once under its owner's name, ready for `from_pretrained`."""

    format = "safetensors"
    summary = "Hugging Face weights for from_pretrained: model.safetensors, or several files with an index"
    refused_options: ClassVar[Mapping[str, str]] = {"world_size": "use max_shard_size"}

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold weights and buffers."""
        return kind in (PARAM, BUFFER)

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Name the optimizer's state, and what belongs to a training run."""
        return (*super().losses(source), *training_losses(source))

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write the files of weights, the index, and the companions with the dtype in config.json made to agree."""
        infos = [info for key, info in source.tensors.items() if self.can_hold(key.kind)]
        files = split(infos, self.options.max_shard_size or MAX_SHARD_SIZE)
        names = file_names(len(files), SINGLE)
        plans = []
        for name, own in zip(names, files, strict=True):
            layout = lay_out(
                [(info.key.name, info.dtype, info.shape) for info in own],
                {"format": "pt", OWN_METADATA: _note(own, source)},
            )
            by_name = {info.key.name: info for info in own}
            plans.append(FilePlan(name, layout, [whole(by_name[entry.name]) for entry in layout.entries]))
        write_files(workspace, plans, source)
        if len(files) > 1:
            workspace.write_bytes(f"{SINGLE}.index.json", index_of(names, files))
        write_companions(workspace, source, infos)


def training_losses(source: Source) -> Iterator[str]:
    """Name what only a resume can use."""
    description = source.description
    for name, value in (
        ("the options of the parameter groups", description.param_groups),
        ("state of the optimizer that is no tensor", description.param_state),
        ("the state of the scheduler", description.scheduler),
        ("the state of the gradient scaler", description.scaler),
        ("the client state", description.client_state),
    ):
        if value:
            yield name


def split(infos: Sequence[TensorInfo], max_shard_size: int) -> list[list[TensorInfo]]:
    """Fill files in order, each up to this many bytes; a larger tensor is alone in its file."""
    files: list[list[TensorInfo]] = [[]]
    nbytes = 0
    for info in infos:
        if files[-1] and nbytes + info.nbytes > max_shard_size:
            files.append([])
            nbytes = 0
        files[-1].append(info)
        nbytes += info.nbytes
    return files


def file_names(count: int, single: str) -> list[str]:
    """Return the names that Transformers expects: `single`, or numbered ones."""
    if count == 1:
        return [single]
    stem, suffix = single.rsplit(".", 1)
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def index_of(
    names: Sequence[str], files: Sequence[Sequence[TensorInfo]], ties: Mapping[str, str] | None = None
) -> bytes:
    """Return the JSON that says which tensor is in which file; aliases of `ties` are where their owner is."""
    everything = [info for own in files for info in own]
    total = {
        "total_parameters": sum(info.numel for info in everything if info.key.kind == PARAM),
        "total_size": sum(info.nbytes for info in everything),
    }
    weight_map = {info.key.name: name for name, own in zip(names, files, strict=True) for info in own}
    weight_map.update({alias: weight_map[owner] for alias, owner in (ties or {}).items() if owner in weight_map})
    return json.dumps({"metadata": total, "weight_map": dict(sorted(weight_map.items()))}, indent=2).encode() + b"\n"


def write_companions(workspace: Workspace, source: Source, infos: Sequence[TensorInfo]) -> None:
    """Copy config, tokenizer and the like; the dtype in config.json becomes that of most weights."""
    for name, path in source.description.files.items():
        if name == "config.json":
            workspace.write_bytes(name, _config_with_dtype(path.read_bytes(), str(path), infos))
        elif is_for_model(name):
            workspace.copy(name, path)


def _note(infos: Sequence[TensorInfo], source: Source) -> str:
    names = {info.key.name for info in infos}
    description = source.description
    note = {
        "buffers": [info.key.name for info in infos if info.key.kind == BUFFER],
        "frozen": sorted(names & description.frozen),
        "ties": {alias: owner for alias, owner in description.ties.items() if owner in names},
    }
    return json.dumps(note, separators=(",", ":"))


def main_dtype(infos: Sequence[TensorInfo]) -> torch.dtype | None:
    """Return the floating dtype that most elements of the weights have."""
    counts: Counter[torch.dtype] = Counter()
    for info in infos:
        if info.key.kind == PARAM and info.dtype.is_floating_point:
            counts[info.dtype] += info.numel
    return counts.most_common(1)[0][0] if counts else None


def _config_with_dtype(text: bytes, path: str, infos: Sequence[TensorInfo]) -> bytes:
    dtype = main_dtype(infos)
    if dtype is None:
        return text
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    name = str(dtype).removeprefix("torch.")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no table")
    if not _set_dtype(config, name):
        config["torch_dtype"] = name  # understood by old and new releases of Transformers
    return json.dumps(config, indent=2).encode() + b"\n"


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Set the dtype where the config, or a config inside it, has one; tell whether the outermost has."""
    for value in config.values():
        if isinstance(value, dict):
            _set_dtype(value, dtype)
    found = [key for key in ("dtype", "torch_dtype") if key in config]
    for key in found:
        if not isinstance(config[key], Mapping):
            config[key] = dtype
    return bool(found)
