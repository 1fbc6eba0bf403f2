"""Where DeepSpeed's partitions put each parameter: one flat vector a group (stages 1 and 2), or each by itself
(stage 3).

Stages 1 and 2: the parameters of a group follow each other, each with its alignment padding; the end is padded; the
vector is cut into one part a rank. So the parts of all ranks, joined, hold the parameters in the order of
param_shapes, and cuts fall anywhere. Whether a part was saved with or without the padding at the end does not matter:
it is at the end.

    group   [ p0 ........ | pad | p1 ...... | pad | p2 .... | pad | end ]
    ranks   [ rank 0          | rank 1          | rank 2            ]

Stage 3: a parameter of n elements is cut into parts of ceil(n / ranks) elements; the parts of a rank follow each
other in the rank's own flat groups, the last one padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..source import CheckpointError
from .stored import FlatTensor, Run, StoredTensor


def cut_flat(
    parts: Sequence[StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    paddings: Sequence[int],
    label: str,
) -> dict[str, FlatTensor]:
    """Return the parameters of one flat vector whose parts, in order of rank, are given (stages 1 and 2)."""
    for part in parts:
        if len(part.shape) != 1:
            raise CheckpointError(f"{label}: a partition has shape {part.shape}; flat ones were expected")
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + part.shape[0])
    found, begin = {}, 0
    for name, shape, padding in zip(shapes, shapes.values(), paddings, strict=True):
        numel = math.prod(shape)
        found[name] = FlatTensor(shape, _runs(parts, begins, begin, numel), f"{label}: {name}")
        begin += numel + padding
    least = begin - (paddings[-1] if paddings else 0)
    align = 2 * len(parts)
    if not least <= begins[-1] <= -(-begin // align) * align:
        raise CheckpointError(f"{label}: its partitions hold {begins[-1]} elements where param_shapes needs {begin}")
    return found


def _runs(parts: Sequence[StoredTensor], begins: Sequence[int], begin: int, numel: int) -> Iterator[Run]:
    for part, first in zip(parts, begins, strict=False):
        low, high = max(begin, first), min(begin + numel, first + part.shape[0])
        if low < high:
            yield Run(low - begin, high - low, part, low - first)


def cut_each(
    ranks: Sequence[Sequence[StoredTensor]], shapes: Mapping[str, tuple[int, ...]], label: str
) -> dict[str, FlatTensor]:
    """Return the parameters of the flat groups that each rank has (stage 3); `shapes` in order over all groups."""
    world = len(ranks)
    places = _places(ranks[0], [_part(shape, world) for shape in shapes.values()], label)
    for groups in ranks[1:]:
        if [group.shape for group in groups] != [group.shape for group in ranks[0]]:
            raise CheckpointError(f"{label}: the flat groups of the ranks differ in length")
    found = {}
    for (name, shape), (group, offset) in zip(shapes.items(), places, strict=True):
        numel, part = math.prod(shape), _part(shape, world)
        runs = [
            Run(rank * part, min(part, numel - rank * part), groups[group], offset)
            for rank, groups in enumerate(ranks)
            if rank * part < numel
        ]
        found[name] = FlatTensor(shape, runs, f"{label}: {name}")
    return found


def _part(shape: tuple[int, ...], world: int) -> int:
    return -(-math.prod(shape) // world)


def _places(groups: Sequence[StoredTensor], parts: Sequence[int], label: str) -> list[tuple[int, int]]:
    """Return (group, offset) of each part; parts follow each other, and none crosses the end of a group."""
    places, group, offset = [], 0, 0
    lengths = [math.prod(item.shape) for item in groups]
    for part in parts:
        while group < len(lengths) and part and offset == lengths[group]:
            group, offset = group + 1, 0
        if part and (group == len(lengths) or offset + part > lengths[group]):
            raise CheckpointError(f"{label}: param_shapes does not fit flat groups of {lengths} elements")
        places.append((group if part else 0, offset if part else 0))
        offset += part
    if offset != (lengths[group] if group < len(lengths) else 0) or group < len(lengths) - 1:
        raise CheckpointError(f"{label}: flat groups of {lengths} elements hold more than param_shapes names")
    return places
