"""The manifest of our sharded format: what is in the folder, piece by piece, sealed with a digest and written last.

A folder of ours:
    ourshard.json                                            the manifest; without it the folder is unfinished
    shard-00001-model-00001-of-00001.safetensors             parameters and buffers of rank 0, by name
    optimizer/exp_avg/shard-00001-model-00001-of-00001...    one folder for each state key, same names
    extra/ema/shard-...                                      kinds that are not the optimizer's
    extra/local.absmax1/shard-...                            its state that one layout can read, by run and part
    ranks/rank-00000.json                                    what belongs to one rank alone (random states)
    config.json, tokenizer.json, ...                         carried along
A piece is [name, start, stop, hash]: a run of elements (Note [Runs and boxes] in pieces.py). Where its bytes begin
follows from the order of the pieces in their file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

from . import plain
from .io import inside
from .pieces import Piece, where
from .safetensors_file import DTYPE_NAMES, DTYPES
from .source import BUFFER, PARAM, CheckpointError, Description, TensorInfo, TensorKey

NAME = "ourshard.json"
PARTIAL_NAMES = "ourshard.ranks-*.json"  # where disks are not shared: the manifest of one node's ranks
VERSION = 1
MODEL = PARAM  # the group of files that hold parameters and buffers, under one set of names
PLAIN = ""  # the group of files that hold no tensors

_SEAL = re.compile(rb'\{"digest": "([0-9a-f]{32})", "body": ')
_LARGEST_WORLD = 1 << 20  # nobody has more; lists of as many ranks are made
_CARRIED = (
    "versions", "ties", "param_groups", "param_state", "extra_state", "scheduler", "scaler", "client_state",
    "adapter_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """Elements [start, stop) of the tensor `name` and the xxh3_128 of their bytes."""

    name: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file: its bytes are the head, whose hash is `digest`, and then the pieces with no gap."""

    path: str
    group: str  # MODEL, a kind of state, or PLAIN
    rank: int | None  # the rank that wrote it; None for files that belong to no rank
    nbytes: int
    head_nbytes: int
    digest: str
    pieces: tuple[PieceRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a folder says of itself."""

    description: Description
    tensors: Mapping[TensorKey, TensorInfo]  # those that lie in files
    scalars: Mapping[TensorKey, torch.Tensor]  # 0-d state, held here once
    files: tuple[FileRecord, ...]
    ranks: tuple[int, ...]  # whose files are in this folder; all of the world unless the disk is a node's own
    mesh: Mapping[str, int] = field(default_factory=dict)  # axis -> length
    config: Mapping[str, Any] = field(default_factory=dict)  # the ShardConfig as plain data
    saved_at: str = ""  # ISO time
    token: str = ""  # of a save on several disks, the same on each
    joined: bool = False  # of several disks, which may hold the same elements

    def pieces(self, prefer: Collection[str] = ()) -> dict[TensorKey, list[Piece]]:
        """Return the pieces of each tensor, sorted. Raises CheckpointError if two of them hold the same elements.

        Of copies on several disks one is taken, in a file of `prefer` if there is any.
        """
        kinds = {key.name: key for key in self.tensors if key.kind in (PARAM, BUFFER)}
        found: dict[TensorKey, list[Piece]] = {key: [] for key in self.tensors}
        for record in self.files:
            begin = record.head_nbytes
            for piece in record.pieces:
                key = kinds.get(piece.name) if record.group == MODEL else TensorKey(record.group, piece.name)
                info = self.tensors.get(key) if key else None
                if key is None or info is None or not 0 <= piece.start <= piece.stop <= info.numel:
                    raise CheckpointError(f"{record.path}: {piece.name} {piece.start}:{piece.stop} is not in the table")
                nbytes = (piece.stop - piece.start) * info.dtype.itemsize
                found[key].append(Piece(record.path, piece.start, piece.stop, begin, nbytes, piece.digest))
                begin += nbytes
            if begin != record.nbytes:
                raise CheckpointError(f"{record.path} has {record.nbytes} bytes in the manifest, its pieces {begin}")
        for key, pieces in found.items():
            pieces.sort(key=lambda piece: (piece.start, piece.stop, piece.file not in prefer, piece.file))
            if self.joined:
                each = key.kind == BUFFER  # every rank has values of its own
                pieces[:] = [p for n, p in enumerate(pieces) if not n or not _is_copy(p, pieces[n - 1], each)]
            for one, other in pairwise(pieces):
                if other.start < one.stop:
                    both = where(self.tensors[key], other.start, min(one.stop, other.stop))
                    raise CheckpointError(f"{key}: {both} are in {one.file} and in {other.file}")
        return found


def _is_copy(piece: Piece, other: Piece, values_may_differ: bool) -> bool:
    same_place = (piece.start, piece.stop) == (other.start, other.stop)
    return same_place and (values_may_differ or piece.digest == other.digest)


def seal(body: Any) -> bytes:
    """Return the JSON of a body with the hash of its bytes before it."""
    text = json.dumps(body, separators=(",", ":")).encode() + b"}\n"
    return b'{"digest": "%s", "body": ' % xxhash.xxh3_128_hexdigest(text).encode() + text


def unseal(data: bytes, path: Path) -> Any:
    """Return the body; raise CheckpointError if a single bit of the file is not as it was written."""
    match = _SEAL.match(data)
    if not match or xxhash.xxh3_128_hexdigest(memoryview(data)[match.end() :]).encode() != match[1]:
        raise CheckpointError(f"{path} is damaged: its bytes do not have the digest it was sealed with")
    try:
        return json.loads(data[match.end() : -2])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def dump(manifest: Manifest) -> bytes:
    """Return the manifest as the bytes of its file."""
    description = manifest.description
    body = {
        "format": "ourshard",
        "version": VERSION,
        "complete": True,
        "saved_at": manifest.saved_at,
        "world_size": description.world_size,
        "ranks": list(manifest.ranks),
        "token": manifest.token,
        "mesh": dict(manifest.mesh),
        "stage": description.stage,
        "step": description.step,
        "config": plain.encode(manifest.config, "config"),
        "frozen": sorted(description.frozen),
        "left_out": dict(description.left_out),
        "own_dtypes": {name: DTYPE_NAMES[dtype] for name, dtype in description.own_dtypes.items()},
        **carried(description),
        "scalars": dump_scalars(manifest.scalars),
        "tensors": dump_tensors(manifest.tensors.values()),
        "files": [dump_file(record) for record in manifest.files],
    }
    return seal(body)


def carried(description: Description) -> dict[str, Any]:
    """Return what callers may fill, as JSON. Raises ValueError for what can't be saved."""
    return {name: plain.encode(getattr(description, name), name) for name in _CARRIED}


def load(data: bytes, path: Path) -> Manifest:
    """Read a manifest from the bytes of its file. Raises CheckpointError naming `path` and what is wrong."""
    body = unseal(data, path)
    try:
        if body["format"] != "ourshard" or body["complete"] is not True:
            raise CheckpointError("it is not the manifest of a complete checkpoint")
        if body["version"] > VERSION:
            raise CheckpointError(f"version {body['version']} is newer than this ourshard reads ({VERSION}); update it")
        return _load_body(body)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the manifest is malformed: {type(error).__name__}: {error}") from error


def _load_body(body: Mapping[str, Any]) -> Manifest:
    found = {name: plain.decode(body[name]) for name in _CARRIED if name in body or name != "extra_state"}
    _check_kinds(body, found)
    description = Description(
        world_size=body["world_size"],
        stage=body["stage"],
        step=body["step"],
        frozen=frozenset(body["frozen"]),
        left_out=body.get("left_out", {}),
        own_dtypes={name: DTYPES[dtype] for name, dtype in body["own_dtypes"].items()},
        **{**found, "param_groups": tuple(found["param_groups"])},
    )
    return Manifest(
        description=description,
        tensors=load_tensors(body["tensors"]),
        scalars=load_scalars(body["scalars"]),
        files=tuple(load_file(record) for record in body["files"]),
        ranks=tuple(body["ranks"]),
        mesh=body["mesh"],
        config=plain.decode(body["config"]),
        saved_at=body["saved_at"],
        token=body.get("token", ""),
    )


def file_name(ranks: Sequence[int], world_size: int) -> str:
    """Return the name of the manifest for a folder that holds the files of these ranks."""
    return NAME if len(ranks) == world_size else PARTIAL_NAMES.replace("*", f"{min(ranks):05d}-{max(ranks):05d}")


def merge(manifests: Sequence[Manifest]) -> Manifest:
    """Join the manifests of several nodes whose files were copied into one folder."""
    first = manifests[0]
    tensors, scalars, files, ranks = dict(first.tensors), dict(first.scalars), list(first.files), set(first.ranks)
    for other in manifests[1:]:
        if _save_of(other) != _save_of(first):
            raise CheckpointError(
                f"the manifests of several nodes are of different saves: ranks {list(first.ranks)} of step "
                f"{first.description.step}, ranks {list(other.ranks)} of step {other.description.step}"
            )
        for key, info in other.tensors.items():
            if tensors.setdefault(key, info) != info:
                raise CheckpointError(f"{key} has one shape or dtype on one node and another on the next")
        scalars.update(other.scalars)
        known = {record.path for record in files}
        files += [record for record in other.files if record.path not in known]
        ranks.update(other.ranks)
    return replace(
        first,
        tensors=tensors,
        scalars=scalars,
        files=tuple(files),
        ranks=tuple(sorted(ranks)),
        joined=first.joined or len(manifests) > 1,
    )


def _save_of(manifest: Manifest) -> tuple[int | None, int | None, str]:
    return manifest.description.step, manifest.description.world_size, manifest.token


def _check_kinds(body: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
    """Refuse what has the digest of a manifest but was made by hand, before other code trips over it."""
    numbers = [body[name] for name in ("world_size", "stage", "step")] + body["ranks"]
    if not all(number is None or (type(number) is int and number >= 0) for number in numbers):
        raise CheckpointError("world_size, stage, step and ranks have to be counts")
    world, ranks = body["world_size"] or 0, body["ranks"]
    if world > _LARGEST_WORLD or len(set(ranks)) < len(ranks) or any(rank >= world for rank in ranks):
        raise CheckpointError(f"ranks have to be numbers of a world of at most {_LARGEST_WORLD}, each once")
    left_out = body.get("left_out", {})
    if not isinstance(left_out, dict) or not all(type(checksum) is int for checksum in left_out.values()):
        raise CheckpointError("left_out has to map names to checksums")
    for name in ("versions", "ties", "param_state", "extra_state", "client_state"):
        if not isinstance(carried.get(name, {}), dict):
            raise CheckpointError(f"{name} has to be a table")
    if not all(isinstance(group, dict) and isinstance(group["params"], list) for group in carried["param_groups"]):
        raise CheckpointError("param_groups has to be a list of tables with a list 'params' each")
    if not all(isinstance(owner, str) for owner in carried["ties"].values()):
        raise CheckpointError("ties has to map names to names")


def dump_tensors(infos: Iterable[TensorInfo]) -> dict[str, dict[str, Any]]:
    """Return {kind: {name: [dtype, shape]}}."""
    table: dict[str, dict[str, Any]] = {}
    for info in infos:
        table.setdefault(info.key.kind, {})[info.key.name] = [DTYPE_NAMES[info.dtype], list(info.shape)]
    return table


def load_tensors(table: Mapping[str, Mapping[str, Any]]) -> dict[TensorKey, TensorInfo]:
    """Read what `dump_tensors` made. Raises CheckpointError or ValueError for what is no shape or dtype."""
    tensors = {}
    for kind, infos in table.items():
        for name, (dtype, shape) in infos.items():
            key = TensorKey(kind, name)
            if not all(type(length) is int and 0 <= length < 1 << 62 for length in shape):
                raise CheckpointError(f"{key}: {shape} is no shape")
            tensors[key] = TensorInfo(key, tuple(shape), DTYPES[dtype])
    return tensors


def dump_file(record: FileRecord) -> dict[str, Any]:
    """Return a file's record as JSON takes it."""
    entry = {item.name: getattr(record, item.name) for item in fields(record)}
    entry["pieces"] = [[piece.name, piece.start, piece.stop, piece.digest] for piece in record.pieces]
    return entry


def load_file(entry: Mapping[str, Any]) -> FileRecord:
    """Read what `dump_file` made; the path has to lie inside of the folder."""
    pieces = tuple(
        PieceRecord(str(name), int(start), int(stop), str(digest)) for name, start, stop, digest in entry["pieces"]
    )
    record = FileRecord(**{**entry, "pieces": pieces})
    if not isinstance(record.group, str):
        raise CheckpointError(f"{record.path}: {record.group!r} is no kind of state")
    inside(Path(), record.path)
    if not 0 <= record.head_nbytes <= record.nbytes:
        raise CheckpointError(f"{record.path}: {record.nbytes} bytes with a head of {record.head_nbytes}")
    return record


def dump_scalars(scalars: Mapping[TensorKey, torch.Tensor]) -> dict[str, list[dict[str, Any]]]:
    """Return {kind: [{dtype, value, names}]}: most often one value for all names."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for key, tensor in scalars.items():
        value, dtype = tensor.item(), DTYPE_NAMES[tensor.dtype]
        group = {"dtype": dtype, "value": plain.encode(value), "names": []}
        groups.setdefault((key.kind, dtype, repr(value)), group)["names"].append(key.name)
    table: dict[str, list[dict[str, Any]]] = {}
    for (kind, _, _), group in groups.items():
        table.setdefault(kind, []).append(group)
    return table


def load_scalars(table: Mapping[str, Any]) -> dict[TensorKey, torch.Tensor]:
    scalars = {}
    for kind, groups in table.items():
        for group in groups:
            tensor = torch.tensor(plain.decode(group["value"]), dtype=DTYPES[group["dtype"]], device="cpu")
            if tensor.dim():
                raise CheckpointError(f"{kind}: {group['value']!r} is no number")
            for name in group["names"]:
                scalars[TensorKey(kind, name)] = tensor
    return scalars
