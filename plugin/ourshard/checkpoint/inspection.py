"""Say what a checkpoint holds, without reading a tensor: as plain data, and as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from ourshard.runtime.wording import counted, file_text

from .source import BUFFER, PARAM, CheckpointError, Source, TensorInfo

_ALSO = ("scheduler", "scaler", "extra_state", "client_state")


@dataclass(frozen=True, slots=True)
class KindSummary:
    """All tensors of one kind."""

    kind: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: dict[str, int]  # dtype -> elements


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One parameter or buffer, with the kinds of state it has."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shards: int | None
    state: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` shows."""

    path: str
    format: str
    world_size: int | None
    stage: int | None
    step: int | None
    bytes_on_disk: int
    files: int
    kinds: tuple[KindSummary, ...]
    tensors: tuple[TensorRow, ...]
    param_groups: tuple[dict[str, Any], ...]  # options, with the number of parameters as "params"
    ties: dict[str, str]
    frozen: tuple[str, ...]
    own_dtypes: dict[str, int]  # dtype in the model where the stored one differs -> parameters
    also: tuple[str, ...]  # scheduler, scaler, client state: what is there beside tensors
    carried_files: tuple[str, ...]
    versions: dict[str, str]
    losses: tuple[str, ...]
    oddities: tuple[str, ...]
    damage: str | None  # a file that is missing or cut off


def inspect(source: Source) -> Inspection:
    """Return what an opened checkpoint holds."""
    description = source.description
    by_kind: dict[str, list[TensorInfo]] = {}
    for info in source.tensors.values():
        by_kind.setdefault(info.key.kind, []).append(info)
    files = _files(source.path)
    return Inspection(
        path=str(source.path),
        format=source.format,
        world_size=description.world_size,
        stage=description.stage,
        step=description.step,
        bytes_on_disk=sum(file.stat().st_size for file in files),
        files=len(files),
        kinds=tuple(_summary(kind, infos) for kind, infos in by_kind.items()),
        tensors=tuple(_rows(source)),
        param_groups=tuple({**group, "params": len(group["params"])} for group in description.param_groups),
        ties=dict(description.ties),
        frozen=tuple(sorted(description.frozen)),
        own_dtypes=dict(Counter(_dtype(dtype) for dtype in description.own_dtypes.values())),
        also=tuple(name for name in _ALSO if getattr(description, name)),
        carried_files=tuple(description.files),
        versions=dict(description.versions),
        losses=(*description.losses, *description.beside),
        oddities=description.oddities,
        damage=_damage(source),
    )


def _damage(source: Source) -> str | None:
    try:
        source.check_sizes()
    except CheckpointError as error:
        return str(error)
    return None


def render(found: Inspection, *, tensors: bool = True) -> RenderableType:
    """Return the tables that `ourshard inspect` prints."""
    parts: list[RenderableType] = [Text(f"{found.path}"), _facts(found), _kinds(found)]
    if tensors:
        parts.append(_tensors(found))
    damage = (found.damage,) if found.damage else ()
    told = (("Not carried by a conversion", found.losses), ("Odd", found.oddities), ("Damaged", damage))
    for title, lines in told:
        if lines:
            parts.append(Text(f"{title}:\n" + "\n".join(f"  - {line}" for line in lines)))
    return Group(*parts)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _summary(kind: str, infos: list[TensorInfo]) -> KindSummary:
    dtypes: Counter[str] = Counter()
    for info in infos:
        dtypes[_dtype(info.dtype)] += info.numel
    numel, nbytes = sum(info.numel for info in infos), sum(info.nbytes for info in infos)
    return KindSummary(kind, len(infos), numel, nbytes, dict(dtypes))


def _rows(source: Source) -> Iterator[TensorRow]:
    state: dict[str, list[str]] = {}
    for key in source.tensors:
        if key.kind not in (PARAM, BUFFER):
            state.setdefault(key.name, []).append(key.kind)
    for key, info in source.tensors.items():
        if key.kind in (PARAM, BUFFER):
            own = tuple(state.get(key.name, ())) if key.kind == PARAM else ()
            dtype, shards = _dtype(info.dtype), source.shards_of(key)
            yield TensorRow(key.name, key.kind, info.shape, dtype, info.nbytes, shards, own)


def _facts(found: Inspection) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    groups = [
        f"{counted(group['params'], 'parameter')}, "
        + ", ".join(f"{key} {group[key]}" for key in ("lr", "weight_decay") if key in group)
        for group in found.param_groups
    ]
    facts = {
        "format": found.format,
        "world size": found.world_size,
        "stage": found.stage,
        "step": found.step,
        "files": f"{found.files}, {file_text(found.bytes_on_disk)}",
        "groups": "\n".join(groups),
        "tied": "\n".join(f"{alias} -> {owner}" for alias, owner in found.ties.items()),
        "frozen": counted(len(found.frozen), "parameter") if found.frozen else "",
        "in the model": ", ".join(
            f"{counted(count, 'parameter')} {dtype}" for dtype, count in found.own_dtypes.items()
        ),
        "also": ", ".join(found.also),
        "carried along": ", ".join(found.carried_files),
        "written by": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    for name, value in facts.items():
        if value not in (None, ""):
            table.add_row(name, escape(str(value)))
    return table


def _kinds(found: Inspection) -> Table:
    table = Table("kind", "tensors", "elements", "bytes", "dtypes")
    for kind in found.kinds:
        dtypes = ", ".join(kind.dtypes)
        table.add_row(escape(kind.kind), f"{kind.tensors:,}", f"{kind.numel:,}", file_text(kind.nbytes), dtypes)
    return table


def _tensors(found: Inspection) -> Table:
    table = Table(Column("name", overflow="fold"), "shape", "dtype", "bytes", "shards", "state")
    for row in found.tensors:
        name = row.name if row.kind == PARAM else f"{row.name} (buffer)"
        shards = "" if row.shards is None else str(row.shards)
        shape = " x ".join(map(str, row.shape)) or "scalar"
        table.add_row(escape(name), shape, row.dtype, file_text(row.nbytes), shards, ", ".join(row.state))
    return table
