"""Write one rank's part of a checkpoint in our sharded format. No process group, no other rank is needed for it.

How a save goes, on any number of ranks (who calls it, and the barriers between the steps, are the runtime's):
1. one rank: `temporary = commit.begin(final)`.
2. every rank: `writer = ShardWriter(temporary, rank, world_size)`, `writer.write(boxes, rank_state)`; the tensors may
   be views of lanes, and have to stay as they are until `write` returns. It ends with the rank's part file, flushed.
3. one rank (of each node, where disks are not shared), when all ranks are through step 2:
   `commit.publish(temporary, final, assemble(temporary, description, ranks=...))`.
If step 2 fails on a rank, nobody may do step 3; `commit.abandon(temporary)` clears up, and the last checkpoint stands.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import xxhash

from . import plain
from .io import DISK, Buffer, DiskIO, inside, write_file
from .manifest import (
    MODEL,
    PLAIN,
    FileRecord,
    PieceRecord,
    dump_file,
    dump_scalars,
    dump_tensors,
    seal,
)
from .pieces import box_of, run_of
from .safetensors_file import Layout, lay_out
from .source import BUFFER, EXTRA_PREFIX, TensorInfo, TensorKey
from .tensor_bytes import bytes_of
from .transfer import TensorRun

PARTS = "parts"


@dataclass(frozen=True, slots=True)
class LocalBox:
    """What one rank holds of a tensor of the whole `shape`: the box of `tensor`'s shape at `starts` (default: zeros).

    It has to be a run of elements: whole rows, or as `runtime.boxes` cuts them. Zero rows are fine.
    """

    shape: tuple[int, ...]
    tensor: torch.Tensor
    starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.run()
        if self.tensor.device.type != "cpu" or not self.tensor.is_contiguous():
            raise ValueError(f"a box has to be contiguous and on the CPU, not on {self.tensor.device}")

    def run(self) -> tuple[int, int]:
        """Return the elements [start, stop) that it covers."""
        return run_of(tuple(self.shape), self.starts or (0,) * len(self.shape), tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file to be written: its head, and which runs follow in which order."""

    path: str
    group: str
    rank: int
    layout: Layout
    runs: tuple[TensorRun, ...]

    def record(self, digests: Sequence[str]) -> FileRecord:
        """Return the record for the manifest, given the hash of each piece."""
        pieces = tuple(
            PieceRecord(run.info.key.name, run.start, run.stop, digest)
            for run, digest in zip(self.runs, digests, strict=True)
        )
        head = self.layout.head
        return FileRecord(
            self.path, self.group, self.rank, self.layout.nbytes, len(head), xxhash.xxh3_128_hexdigest(head), pieces
        )


def plan_files(runs: Iterable[TensorRun], rank: int, world_size: int) -> list[ShardFile]:
    """Sort one rank's runs, each of them a box, into files: one for each kind, a further one for a second of a tensor.

    A file of no piece is not planned, and an empty run only for a tensor that has no element at all: torch's reader has
    to see its name. The same runs give the same files on every rank and in every run of the program.
    """
    files: dict[tuple[str, int], list[TensorRun]] = {}
    seen: Counter[TensorKey] = Counter()
    for run in runs:
        key = run.info.key
        if run.start == run.stop and run.info.numel:
            continue
        files.setdefault((MODEL if key.kind == BUFFER else key.kind, seen[key]), []).append(run)
        seen[key] += 1
    return [_plan_file(group, nth * world_size + rank, rank, world_size, own) for (group, nth), own in files.items()]


def _plan_file(group: str, number: int, rank: int, world_size: int, runs: Sequence[TensorRun]) -> ShardFile:
    by_name = {run.info.key.name: run for run in runs}
    boxes = {name: box_of(run.info.shape, run.start, run.stop) for name, run in by_name.items()}
    shapes = {name: run.info.shape for name, run in by_name.items()}
    offsets = {name: {"saved_offsets": starts} for name, (starts, _) in boxes.items()}
    own = {"rank": rank, "world_size": world_size, "shapes": shapes}
    layout = lay_out(
        [(run.info.key.name, run.info.dtype, boxes[run.info.key.name][1]) for run in runs],
        {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":")),
            "ourshard": json.dumps(own, separators=(",", ":")),
        },
    )
    path = f"{folder_of(group)}shard-{number + 1:05d}-model-00001-of-00001.safetensors"
    return ShardFile(path, group, rank, layout, tuple(by_name[entry.name] for entry in layout.entries))


def folder_of(group: str) -> str:
    """Return the folder for a kind's files, with a slash; "" for the model's, which torch's tools look for on top."""
    if group == MODEL:
        return ""
    if group.startswith(EXTRA_PREFIX):
        return f"extra/{quote(group[len(EXTRA_PREFIX) :], safe='')}/"
    return f"optimizer/{quote(group, safe='')}/"


class ShardWriter:
    """Writes one rank's files into the temporary folder of a save, each flushed once."""

    def __init__(self, folder: Path, rank: int, world_size: int, io: DiskIO = DISK) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a world of {world_size}")
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self._io = io
        self._extra_files: list[FileRecord] = []

    def add_file(self, name: str, data: Buffer, *, owned: bool = False) -> None:
        """Write a file that goes along (config.json); `owned`: it is this rank's alone. Call before `write`."""
        path = inside(self.folder, name)
        self._io.make_folder(path.parent)
        write_file(self._io, path, [data])
        nbytes = memoryview(data).nbytes
        record = FileRecord(name, PLAIN, self.rank if owned else None, nbytes, nbytes, xxhash.xxh3_128_hexdigest(data))
        self._extra_files.append(record)

    def write(
        self,
        boxes: Mapping[TensorKey, LocalBox | Sequence[LocalBox]],
        rank_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what this rank holds, then its part file, which says so to the rank that assembles the manifest.

        Each element of each tensor is to be given by exactly one rank; 0-d optimizer state (`step`) by any ranks that
        have it, with one value. `rank_state` is plain data that belongs to this rank alone.
        """
        held = {key: [item] if isinstance(item, LocalBox) else list(item) for key, item in boxes.items()}
        held = {key: items for key, items in held.items() if items}
        for key, items in held.items():
            if len({(tuple(item.shape), item.tensor.dtype) for item in items}) > 1:
                raise ValueError(f"{key}: its boxes differ in whole shape or dtype")
        infos = {key: TensorInfo(key, tuple(items[0].shape), items[0].tensor.dtype) for key, items in held.items()}
        scalars = {key: items[0].tensor for key, items in held.items() if is_scalar(infos[key])}
        for key in scalars:
            del infos[key]
        data = {(key, item.run()[0]): item.tensor for key in infos for item in held[key] if item.tensor.numel()}
        runs = [TensorRun(infos[key], *item.run()) for key in infos for item in held[key]]
        records = [self._write_file(file, data) for file in plan_files(runs, self.rank, self.world_size)]
        if rank_state is not None:
            text = seal(plain.encode(rank_state, f"state of rank {self.rank}"))
            self.add_file(rank_state_path(self.rank), text, owned=True)
        part = {
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": dump_tensors(infos.values()),
            "scalars": dump_scalars(scalars),
            "files": [dump_file(record) for record in [*records, *self._extra_files]],
        }
        self._io.make_folder(self.folder / PARTS)
        write_file(self._io, self.folder / PARTS / f"rank-{self.rank:05d}.json", [seal(part)])

    def _write_file(self, file: ShardFile, data: Mapping[tuple[TensorKey, int], torch.Tensor]) -> FileRecord:
        path = inside(self.folder, file.path)
        self._io.make_folder(path.parent)
        buffers = [bytes_of(data[run.info.key, run.start]) if run.nbytes else b"" for run in file.runs]
        write_file(self._io, path, [file.layout.head, *buffers])
        return file.record([xxhash.xxh3_128_hexdigest(buffer) for buffer in buffers])


def rank_state_path(rank: int) -> str:
    """Return where a rank's own state lies in the folder."""
    return f"ranks/rank-{rank:05d}.json"


def is_scalar(info: TensorInfo) -> bool:
    """Tell whether a tensor is 0-d state (`step`), which is held in the manifest and in no file."""
    return info.key.is_state and not info.shape
