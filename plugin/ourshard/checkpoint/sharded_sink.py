"""Write our sharded format from any source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import ClassVar

from . import plain
from .manifest import NAME, PLAIN, FileRecord, Manifest, dump, seal
from .shard_writer import is_scalar, plan_files, rank_state_path
from .sink import Sink
from .source import PARAM, Source, TensorInfo
from .transfer import FilePlan, TensorRun, write_files
from .workspace import Workspace


class ShardedSink(Sink):
    """Our format. Holds all there is; cut for `world_size` ranks."""

    format = "ourshard"
    summary = "ourshard's own: weights, optimizer and all else, loads on any number of ranks"
    refused_options: ClassVar[Mapping[str, str]] = {"max_shard_size": "its files are cut by rank; use world_size"}

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold everything."""
        return True

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Lose nothing."""
        return ()

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write the files of each rank, then the manifest."""
        world_size = self.options.world_size or source.description.world_size or 1
        tensors = {key: info for key, info in source.tensors.items() if not is_scalar(info)}
        cuts = cut_rows(list(tensors.values()), world_size)
        files = [file for rank in range(world_size) for file in plan_files(cuts[rank], rank, world_size)]
        write_files(workspace, [FilePlan(file.path, file.layout, file.runs) for file in files], source)
        records = [file.record(workspace.written[file.path].digests) for file in files]
        same_world = world_size == source.description.world_size
        records += _write_companions(workspace, source, world_size if same_world else 0)
        manifest = Manifest(
            description=replace(source.description, world_size=world_size, files={}, losses=(), beside=(), oddities=()),
            tensors=tensors,
            scalars={key: source.read(key) for key, info in source.tensors.items() if is_scalar(info)},
            files=tuple(records),
            ranks=tuple(range(world_size)),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        )
        workspace.write_bytes(NAME, dump(manifest))


def cut_rows(infos: list[TensorInfo], world_size: int) -> list[list[TensorRun]]:
    """Give each rank about as many bytes of each kind, in whole rows: most tensors lie on one rank or two.

    State of a parameter's shape is cut where the parameter is, so that a rank finds both in its own files.
    """
    shares: list[list[TensorRun]] = [[] for _ in range(world_size)]
    bounds: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for kind in sorted({info.key.kind for info in infos}, key=lambda kind: kind != PARAM):
        own = [info for info in infos if info.key.kind == kind]
        position, total = 0, sum(info.nbytes for info in own)
        for info in own:
            fair = [_row_at(info, rank * total // world_size - position) for rank in range(1, world_size)]
            cuts = bounds.setdefault((info.key.name, info.shape), [0, *fair, info.rows])
            for rank in range(world_size):
                if cuts[rank] < cuts[rank + 1] or (rank == 0 and not info.numel):
                    shares[rank].append(TensorRun(info, cuts[rank] * info.row_numel, cuts[rank + 1] * info.row_numel))
            position += info.nbytes
    return shares


def _row_at(info: TensorInfo, position: int) -> int:
    """Return the first row that begins at or after this byte of the tensor, within its bounds."""
    return min(info.rows, max(0, -(-position // info.row_nbytes))) if info.row_nbytes else info.rows


def _write_companions(workspace: Workspace, source: Source, ranks: int) -> Iterator[FileRecord]:
    for name, path in source.description.files.items():
        workspace.copy(name, path)
        yield _plain_record(workspace, name, None)
    for rank in range(ranks):
        state = source.rank_state(rank)
        if state:
            name = rank_state_path(rank)
            workspace.write_bytes(name, seal(plain.encode(state, f"state of rank {rank}")))
            yield _plain_record(workspace, name, rank)


def _plain_record(workspace: Workspace, name: str, rank: int | None) -> FileRecord:
    written = workspace.written[name]
    return FileRecord(name, PLAIN, rank, written.nbytes, written.nbytes, written.digests[0])
