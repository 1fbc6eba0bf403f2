"""What one rank holds of a running model: of each parameter a run of elements, and the tensor that an optimizer steps.

Planning a save needs no word from other ranks: layouts are the same everywhere, and so is the rule of who writes what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ourshard.runtime.boxes import boxes_of
from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.layout import LaneTensor, RowRange
from ourshard.runtime.mesh import Axis
from ourshard.runtime.run import Run
from ourshard.runtime.state import persistent

from .disks import Disk
from .shard_writer import LocalBox
from .staging import ToHost


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Elements [start, stop) of the parameter `name` of the whole `shape`, on this rank."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    own_dtype: torch.dtype  # as the model was loaded; the values may be masters of another
    trained: bool
    values: torch.Tensor  # a view of the masters
    start: int
    stop: int
    writes: bool  # this rank saves these elements; others may hold the same
    whole: bool  # every rank holds the parameter whole
    stepped: torch.Tensor  # what stands for it in an optimizer's groups
    offset: int  # of these elements in `stepped`, flattened
    resting: bool = False  # `stepped` is a handle, which no run stands for, as a parameter that is not trained
    owner: bool | None = None  # one rank steps it whole and has all of its state: this one or not; None: no such rank

    @property
    def flat(self) -> bool:
        """Tell whether an optimizer steps these elements, and not the parameter: its state is of this rank."""
        return not self.whole and not self.resting and self.owner is None

    @property
    def numel(self) -> int:
        """Count the elements that are here."""
        return self.stop - self.start

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of a state that has one value an element; at rest it is of the elements that are here."""
        return (max(1, self.numel),) if self.resting else tuple(self.stepped.shape)

    def elements(self, state: torch.Tensor) -> torch.Tensor:
        """Return the values of these elements, 1-d, in a state that has one an element of what is stepped."""
        flat = state.detach().reshape(-1)
        if self.resting and tuple(state.shape) == self.shape:  # of before the model was sharded
            return flat[self.start : self.stop]
        return flat[self.offset :][: self.numel]

    def boxes(self, flat: torch.Tensor, to_host: ToHost) -> list[LocalBox]:
        """Return the boxes that a flat tensor of these elements covers, where `to_host` puts them."""
        flat = to_host(flat)
        total = math.prod(self.shape)
        if total == 0:
            return [LocalBox(self.shape, flat.new_empty(self.shape))]
        found = boxes_of(self.shape, LaneTensor(0, 0, total, 1), RowRange(self.start, self.stop, 0))
        return [
            LocalBox(self.shape, flat[box.offset : box.offset + box.numel].view(box.sizes), box.starts) for box in found
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A persistent buffer, which every rank holds whole."""

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor


def portions_of(engine: Engine, disk: Disk | None = None) -> list[Portion]:
    """Return this rank's part of each parameter, in the order of the model, which is no matter of stage or world.

    `disk`: whose ranks share the work of writing what they hold alike; all ranks by default.
    """
    world = engine.mesh.world
    disk = disk or Disk(tuple(range(world.size)), leads=world.rank == 0)
    found = [portion for number, lane in enumerate(engine.lanes()) for portion in _of_lane(number, lane, disk)]
    known = {name for portion in found for name in (portion.name, *portion.aliases)}
    found += _ignored(engine, known, disk.leads)
    order = {names[0]: number for number, (names, _) in enumerate(_tensors(engine))}
    return sorted(found, key=lambda portion: order[portion.name])


def _of_lane(number: int, lane: Lane, disk: Disk) -> Iterator[Portion]:
    runs = {position: run for run in lane.runs for position in run.positions}
    its_turn = has_turn(lane, number, disk)
    for position, parameter in enumerate(lane.parameters):
        rows, granule = lane.rows(position), lane.layout.tensors[position].granule
        run = runs.get(position)
        empty = not parameter.numel and lane.part and not lane.placement.whole  # one is enough to tell its name
        yield Portion(
            name=parameter.name,
            aliases=tuple(parameter.aliases),
            shape=tuple(parameter.shape),
            own_dtype=parameter.dtype,
            trained=lane.leaves[position].requires_grad,
            values=lane.stored(position),
            start=rows.start * granule,
            stop=rows.stop * granule,
            writes=its_turn and not empty,
            whole=lane.placement.whole,
            stepped=run.parameter if run is not None else lane.resting[position],
            offset=_offset(run, rows) if run is not None else 0,
            resting=run is None and not lane.placement.whole,
            owner=run.owner == lane.spread.rank if run is not None and run.owner is not None else None,
        )


def has_turn(lane: Lane, number: int, disk: Disk) -> bool:
    """Say whether this rank saves what it holds of the `number`-th lane: ranks that hold the same take turns."""
    mesh = lane.unit.engine.mesh
    holders = ranks_of(mesh.world if lane.placement.whole else mesh.replicate, mesh.world.rank)
    return lane.divided or disk.turn(holders, number) == mesh.world.rank


def places_digest(lane: Lane) -> str:
    """Return a hash of where the parameters of a lane lie, and of the mesh it is cut for."""
    places = [(lane.name_of(position), tensor.offset) for position, tensor in enumerate(lane.layout.tensors)]
    mesh = lane.unit.engine.mesh
    sizes = [axis.size for axis in (mesh.shard, mesh.replicate, mesh.node)]
    return xxhash.xxh3_64_hexdigest(repr((places, sizes)).encode())


def ranks_of(axis: Axis, rank: int) -> list[int]:
    """Return the ranks of an axis, counted in the world, `rank` among them."""
    return [rank] if axis.group is None else dist.get_process_group_ranks(axis.group)


def _offset(run: Run, rows: RowRange) -> int:
    return rows.offset - run.start if rows.rows else 0


def _ignored(engine: Engine, known: set[str], lead: bool) -> Iterator[Portion]:
    """Yield the parameters that ourshard was told to leave alone: those of the rank that leads are saved."""
    for names, value in _tensors(engine):
        if isinstance(value, nn.Parameter) and not known & set(names):
            yield Portion(
                name=names[0],
                aliases=tuple(names[1:]),
                shape=tuple(value.shape),
                own_dtype=value.dtype,
                trained=value.requires_grad,
                values=value.detach(),
                start=0,
                stop=value.numel(),
                writes=lead,
                whole=True,
                stepped=value,
                offset=0,
            )


def buffers_of(engine: Engine) -> list[Buffer]:
    """Return the persistent buffers, each once."""
    return [
        Buffer(names[0], tuple(names[1:]), value)
        for names, value in _tensors(engine)
        if not isinstance(value, nn.Parameter)
    ]


def _tensors(engine: Engine) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield (all names, tensor) of what the model's state dict holds, tied ones once."""
    model = engine.model()
    assert model is not None
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in persistent(model):
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    for key, value in tensors.items():
        yield names[key], value
