"""Read safetensors of Hugging Face, weights only: one file, or an index and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ourshard.runtime.wording import counted

from .companions import companions
from .foreign.draft import Draft, ForeignSource
from .foreign.runfiles import read_json
from .io import inside
from .numbered import Models, numbered, of_model
from .pieces import FilePool, Piece, read_rows, read_run_into
from .safetensors_file import Header, read_header
from .source import PARAM, CheckpointError, TensorInfo, TensorKey

SINGLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
OWN_METADATA = "ourshard"  # what our writer notes in a file: buffers, ties, frozen names of that file

_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a safetensors file, as `ForeignSource` reads it."""

    pool: FilePool
    info: TensorInfo
    piece: Piece

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the whole shape."""
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the stored dtype."""
        return self.info.dtype

    def read(self, start_row: int, stop_row: int, check: bool = True) -> torch.Tensor:
        """Return these rows; there is no checksum to check."""
        return read_rows(self.pool, self.info, [self.piece], start_row, stop_row)


class SafetensorsSource(ForeignSource):
    """Weights in safetensors. The names of tied aliases are in no file; where possible they are found again."""

    format = "safetensors"
    looks_for = f"a *.safetensors file, or a folder with {SINGLE} or *{INDEX_SUFFIX}"

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of files, as accelerate's `save_state` gives them."""
        return numbered(found, r"model(?:_(?P<n>\d+))?\.safetensors")

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        folder = path.parent if path.is_file() else path
        names, index = _choose_files(path, of_model("model", model, ".safetensors"))
        headers = {name: _open_header(folder, name) for name in names}
        self._files = {name: inside(folder, name).stat().st_size for name in headers}
        self._pool = FilePool(folder, self._files)
        draft = Draft(model=self._tensors(headers), files=companions(folder))
        _read_notes(draft, headers)
        if draft.ties is None:
            tie_by_config(draft)
        draft.oddities += _check_index(index, headers)
        _check_numbers(folder, headers)
        if any((folder / name).exists() for name in _OPTIMIZERS):
            draft.losses.append("an optimizer file that lies beside the weights")
        self.publish(draft)

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the file or folder of safetensors."""
        if path.is_file():
            if path.name.endswith(INDEX_SUFFIX):
                return path.parent
            return path if path.suffix == ".safetensors" else None
        return path if any(path.glob("*.safetensors")) or any(path.glob(f"*{INDEX_SUFFIX}")) else None

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the elements from `start` on."""
        reader = self._readers[key]
        assert isinstance(reader, FileTensor)
        read_run_into(self._pool, reader.info, [reader.piece], start, target)

    def verify_files(self) -> Iterator[tuple[str, str | None]]:
        """Report the files: the format has no hashes, their headers and lengths were checked when they were opened."""
        for name in self._files:
            yield name, None

    def close(self) -> None:
        """Close the files."""
        self._pool.close()

    def _tensors(self, headers: Mapping[str, Header]) -> dict[str, Any]:
        found: dict[str, FileTensor] = {}
        for file, header in headers.items():
            for entry in header.entries:
                if entry.name in found:
                    raise CheckpointError(f"{entry.name} is in {found[entry.name].piece.file} and again in {file}")
                info = TensorInfo(TensorKey(PARAM, entry.name), entry.shape, entry.dtype)
                piece = Piece(file, 0, info.numel, entry.begin, entry.nbytes)
                found[entry.name] = FileTensor(self._pool, info, piece)
        return dict(found)


def _open_header(folder: Path, name: str) -> Header:
    path = inside(folder, name)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return read_header(path)


def _choose_files(path: Path, single: str) -> tuple[list[str], Mapping[str, str] | None]:
    """Return the files to open, and the weight map (tensor -> file) if there is an index."""
    if path.is_file():
        return [path.name], None
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise CheckpointError(
            f"{path} has several indexes: {', '.join(index.name for index in indexes)}; name one file"
        )
    if indexes:
        weight_map = _read_index(indexes[0])
        return sorted(set(weight_map.values())), weight_map
    if (path / single).is_file():
        return [single], None
    names = sorted(file.name for file in path.glob("*.safetensors"))
    numbered = [name for name in names if _NUMBERED.fullmatch(name)]
    if not numbered and len(names) > 1:
        raise CheckpointError(f"{path} has several models: {', '.join(names)}; name one file")
    return numbered or names, None


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    try:
        if not isinstance(weight_map, dict):
            raise ValueError("it has no table weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not file.endswith(".safetensors"):
                raise ValueError(f"{name!r} -> {file!r}")
            inside(path.parent, file)
    except ValueError as error:
        raise CheckpointError(f"{path} is no index of safetensors: {error}") from error
    if not weight_map:
        raise CheckpointError(f"{path} lists no tensor")
    return weight_map


def _read_notes(draft: Draft, headers: Mapping[str, Header]) -> None:
    """Take what our own writer noted: which names are buffers, tied, frozen. Other files say nothing of it."""
    notes = [header.metadata[OWN_METADATA] for header in headers.values() if OWN_METADATA in header.metadata]
    if not notes:
        return
    try:
        tables = [json.loads(note) for note in notes]
        draft.buffers = frozenset(name for table in tables for name in table["buffers"])
        draft.frozen = frozenset(name for table in tables for name in table["frozen"])
        draft.ties = {str(alias): str(owner) for table in tables for alias, owner in table["ties"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the note of ourshard in a safetensors header is damaged: {error}") from error


def tie_by_config(draft: Draft) -> None:
    """Name the output head that `save_pretrained` left out, where config.json says that it is tied to the embedding.

    Only for language models with one tensor of the vocabulary's length that is called as embeddings are.
    """
    config = read_json(draft.files["config.json"]) if "config.json" in draft.files else {}
    causal = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in config.get("architectures") or ())
    if config.get("tie_word_embeddings") is not True or not causal or _HEAD in draft.model:
        return
    owners = [
        name
        for name, tensor in draft.model.items()
        if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2 and tensor.shape[0] == config.get("vocab_size")
    ]
    if len(owners) == 1:
        draft.ties = {_HEAD: owners[0]}
        draft.oddities.append(f"{_HEAD} is in no file; config.json says that it is tied, to {owners[0]}")


def _check_index(index: Mapping[str, str] | None, headers: Mapping[str, Header]) -> list[str]:
    """Raise CheckpointError for a tensor that is not where the index says; return what else does not fit."""
    if index is None:
        return []
    held = {file: {entry.name for entry in header.entries} for file, header in headers.items()}
    for name, file in index.items():
        if name not in held[file]:
            raise CheckpointError(f"the index says that {name} is in {file}, but it is not")
    extra = sum(len(names) for names in held.values()) - len(index)
    return [f"{counted(extra, 'tensor')} in the files and not in the index"] if extra else []


def _check_numbers(folder: Path, headers: Mapping[str, Header]) -> None:
    """Raise CheckpointError if files are numbered `i-of-n` and one of the n is missing."""
    for name in headers:
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            continue
        stem, _, total = numbered.groups()
        for number in range(1, int(total) + 1):
            other = f"{stem}-{number:05d}-of-{total}.safetensors"
            if other not in headers:
                raise CheckpointError(f"{folder / other} is missing: {name} is one of {counted(int(total), 'file')}")
