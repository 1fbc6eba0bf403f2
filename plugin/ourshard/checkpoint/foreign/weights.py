"""Files of weights of Hugging Face libraries: one file or several with an index, safetensors or torch.save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ourshard.runtime.wording import shorten

from ..io import inside
from ..numbered import of_model
from ..safetensors_file import read_header
from ..source import CheckpointError
from .classes import PickledTensor
from .runfiles import read_json
from .stored import Bytes, Readable, StoredTensor, contiguous
from .torchfile import TorchFile

_WRAPPINGS = ("state_dict", "model_state_dict", "model", "module")  # under which training scripts put a state_dict


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model by name."""

    tensors: dict[str, Readable]
    in_model_order: bool  # torch.save keeps the order of the state_dict, safetensors sorts by name
    ties: dict[str, str]  # names that show the same bytes: later -> first
    left: tuple[str, ...] = ()  # what lies beside the state_dict in its file


def find_weights(folder: Path, stems: tuple[str, ...], model: int = 0) -> Path | None:
    """Return the file or index to read for the first of these stems ("model", "adapter_model") that is there."""
    for stem in (of_model(stem, model) for stem in stems):
        for ending in (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"):
            path = folder / (stem + ending)
            if path.is_file():
                return path
    return None


def read_weights(path: Path) -> Weights:
    """Read the directory of a file of weights, or of all that an index names."""
    tensors: dict[str, Readable] = {}
    ties: dict[str, str] = {}
    left: list[str] = []
    in_order = True
    for file, wanted in _files(path):
        found: dict[str, Readable]
        if file.suffix == ".safetensors":
            found, in_order = dict(safetensors(file)), False
        else:
            found, own_ties, beside = torch_tensors(file)
            ties.update(own_ties)
            left += beside
        if wanted is not None and (lost := wanted - found.keys()):
            raise CheckpointError(f"{file}: lacks {sorted(lost)[0]!r}, which {path.name} says is in it")
        if double := tensors.keys() & found.keys():
            raise CheckpointError(f"{file}: {sorted(double)[0]!r} is in another file of {path.name} too")
        tensors.update(found)
    return Weights(tensors, in_order, ties, tuple(left))


def _files(path: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield the files and, by an index, the names that each has to hold."""
    if path.suffix != ".json":
        yield path, None
        return
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{path}: has no weight_map of names and files")
    for name in sorted(set(places.values())):
        try:
            file = inside(path.parent, name)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if not file.is_file():
            raise CheckpointError(f"{path}: the file {name} is missing")
        yield file, {key for key, value in places.items() if value == name}


def safetensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a safetensors file."""
    for entry in read_header(path).entries:
        content = Bytes(path, entry.begin, entry.nbytes, None, f"{path}: {entry.name}")
        yield entry.name, contiguous(entry.shape, entry.dtype, content)


def torch_tensors(path: Path) -> tuple[dict[str, Readable], dict[str, str], list[str]]:
    """Return the tensors of a state_dict in a file of torch.save, names that show the same bytes, what is beside it."""
    file = TorchFile(path)
    content, beside = file.load(), []
    for word in _WRAPPINGS:
        if isinstance(content, dict) and isinstance(content.get(word), dict):
            beside = sorted(str(key) for key in content if key != word)
            content = content[word]
            break
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path}: holds no state_dict of a model")
    found: dict[str, Readable] = {}
    ties: dict[str, str] = {}
    first: dict[PickledTensor, str] = {}
    for name, tensor in content.items():
        if isinstance(tensor, PickledTensor):
            found[name] = file.stored(tensor)
            owner = first.setdefault(tensor, name)
            if owner != name and tensor.numel:
                ties[name] = owner
    if content and not found:
        raise CheckpointError(f"{path}: holds no state_dict of a model: no tensor in {shorten(sorted(content))}")
    return found, ties, beside
