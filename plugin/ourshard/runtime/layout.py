"""Lay the tensors of a unit into flat lanes that cut into equal shards between rows.

Pure Python: no torch, no process group. Every rank computes the same plan from the same specs. All sizes are elements.

Note [Cut congruence]
A cut at `k * shard_numel` may cross a tensor at offset `o` with granule `g` only if it equals `o` modulo `g`.
- Crossed once: `o` must be the cut modulo `g`, and 0 modulo `align`. Shards are multiples of `align`, so the cut is 0
  modulo `align` too, and both hold exactly when `o` is the cut minus a multiple of `lcm(g, align)`. Such an `o` always
  exists: an aligned start is never in conflict with the cut.
- Crossed twice or more: two cuts differ by `shard_numel`, so `g` must divide it, and then any `o` that is a multiple of
  `lcm(g, align)` will do.
So only tensors longer than two shards force their granule on the shard size. That is why the planner searches the
smallest shard that takes all tensors, and does not round it to the least common multiple of every row.

Note [Joined shards]
Every m-th cut of a plan is a cut of the plan, so `m` consecutive shards joined are a valid plan for `world / m` ranks.
Masters over shard x replicate use the plan for the product of both; whole parameters use the joined one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ourshard.runtime.lane_search import Extent, LaneFit, plan_lanes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to lay out. Tensors with equal `key` (dtype, trainable, ...) may share a lane."""

    name: str
    shape: tuple[int, ...]
    key: Hashable

    def __post_init__(self) -> None:
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative dimension in its shape {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def granule(self) -> int:
        """Elements that no cut may separate: those after the first dimension larger than 1; 1 for 0-d, 1-d, empty."""
        for dim, extent in enumerate(self.shape):
            if extent > 1:
                return max(1, math.prod(self.shape[dim + 1 :]))
        return 1

    @property
    def rows(self) -> int:
        return self.numel // self.granule

    def granule_within(self, numel: int) -> int:
        """Return the largest granule of at most `numel` elements that keeps whole trailing dimensions.

        At the finest it keeps the last dimension whole; a matrix keeps `granule`.
        """
        granule = self.granule
        for dim in range(1, len(self.shape) - 1):
            if granule <= numel:
                break
            granule = min(granule, max(1, math.prod(self.shape[dim + 1 :])))
        return granule


@dataclass(frozen=True, slots=True)
class LaneTensor:
    """A tensor placed in a lane.

    `index` is its position in the specs given to `plan_unit`; `offset` counts from the lane's start. `granule` is the
    spec's, or a finer one where `plan_unit` was allowed `fine_granules`; rows are counted in it.
    """

    index: int
    offset: int
    numel: int
    granule: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def rows(self) -> int:
        return self.numel // self.granule


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, stop) of one tensor on one rank, at element `offset` of its shard; empty where start == stop."""

    start: int
    stop: int
    offset: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def numel(self, granule: int) -> int:
        return self.rows * granule


EMPTY_ROWS = RowRange(0, 0, 0)


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """One flat buffer of `world` equal shards; cuts fall between rows, or in padding (dots).

        rank      0               1               2               3
        |-- shard_numel --|-- shard_numel --|-- shard_numel --|-- shard_numel --|
        [ q 0 | q 1 | q 2 | q 3 | q 4 | q 5 | o 0 | o 1 | o 2 | norm | bias |...]
        ^ offset of q                       ^ offset of o

    Here rank 1 holds the rows [3, 6) of q, at offset 0 of its shard. A tensor lies on consecutive ranks, whole rows on
    each. `tensors` are sorted by offset.
    """

    key: Hashable
    tensors: tuple[LaneTensor, ...]
    shard_numel: int
    world: int

    @property
    def numel(self) -> int:
        return self.shard_numel * self.world

    @property
    def padding(self) -> int:
        return self.numel - sum(tensor.numel for tensor in self.tensors)

    def rows_on(self, position: int, rank: int) -> RowRange:
        """Return the rows of `tensors[position]` that `rank` holds."""
        tensor = self.tensors[position]
        shard_start = rank * self.shard_numel
        start = max(shard_start, tensor.offset)
        stop = min(shard_start + self.shard_numel, tensor.stop)
        if start >= stop:
            return EMPTY_ROWS
        return RowRange(
            start=(start - tensor.offset) // tensor.granule,
            stop=(stop - tensor.offset) // tensor.granule,
            offset=start - shard_start,
        )

    def span_on(self, position: int, rank: int) -> slice:
        """Return where `rank`'s shard has `tensors[position]` and the padding before it; after the last one, too.

        The spans of all tensors are the whole shard.
        """
        start = self.tensors[position - 1].stop if position else 0
        stop = self.tensors[position].stop if position + 1 < len(self.tensors) else self.numel
        shard_start = rank * self.shard_numel
        first = min(max(start - shard_start, 0), self.shard_numel)
        return slice(first, min(max(stop - shard_start, first), self.shard_numel))

    def ranks_of(self, position: int) -> range:
        """Return the ranks that hold rows of `tensors[position]`; none for an empty tensor."""
        tensor = self.tensors[position]
        if tensor.numel == 0:
            return range(0)
        return range(tensor.offset // self.shard_numel, (tensor.stop - 1) // self.shard_numel + 1)

    def joined(self, shards: int) -> LaneLayout:
        """Return the same lane cut into `world / shards` pieces of `shards` shards each: Note [Joined shards]."""
        if shards < 1 or self.world % shards:
            raise ValueError(f"shards can't be joined by {shards}: the lane has {self.world} of them")
        return LaneLayout(self.key, self.tensors, self.shard_numel * shards, self.world // shards)

    def validate(self, align: int = 1) -> None:
        """Raise AssertionError where a law of the layout is broken: bounds, overlap, alignment, cuts between rows."""
        assert self.shard_numel % align == 0, f"shards of {self.shard_numel} elements are not multiples of {align}"
        end = 0
        for tensor in self.tensors:
            assert tensor.offset >= end, f"{tensor} overlaps the tensor before it, which ends at {end}"
            assert tensor.offset % align == 0, f"{tensor} does not start at a multiple of {align}"
            assert tensor.numel % tensor.granule == 0, f"{tensor} is not whole rows"
            self._validate_cuts(tensor)
            end = tensor.stop
        assert end <= self.numel, f"tensors end at {end}, past the lane's {self.numel} elements"

    def _validate_cuts(self, tensor: LaneTensor) -> None:
        # Two cuts are enough to look at: the rest follow from their difference, Note [Cut congruence].
        first = (tensor.offset // self.shard_numel + 1) * self.shard_numel
        for cut in (first, first + self.shard_numel):
            if cut < tensor.stop:
                assert (cut - tensor.offset) % tensor.granule == 0, f"the cut at {cut} splits a row of {tensor}"


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The lanes of one unit. Every spec given to `plan_unit` is in exactly one of them."""

    lanes: tuple[LaneLayout, ...]

    @property
    def numel(self) -> int:
        return sum(lane.numel for lane in self.lanes)

    @property
    def padding(self) -> int:
        return _padding(self.lanes)

    def validate(self, align: int = 1) -> None:
        """Raise AssertionError where a law of the layout is broken, in a lane or between lanes."""
        for lane in self.lanes:
            lane.validate(align)
        indices = sorted(tensor.index for lane in self.lanes for tensor in lane.tensors)
        assert indices == list(range(len(indices))), f"specs are missing or placed twice: {indices}"


def plan_unit(
    specs: Sequence[TensorSpec],
    world: int,
    *,
    align: int = 16,
    max_padding: float = 0.01,
    max_padding_numel: int = 1_000_000,
    fine_granules: bool = False,
) -> UnitLayout:
    """Lay `specs` into as few lanes as padding allows, each cut into `world` equal shards between rows.

    Shards are multiples of `align` elements and every tensor starts at one. Tensors of one key share a lane unless its
    padding passes `max(max_padding * numel, max_padding_numel)` elements; then up to three lanes are tried. If that is
    not enough, `fine_granules` lets cuts fall inside the rows of tensors of three and more dimensions, between rows of
    a later one: without, 8 fused experts pad 418% on 64 ranks. A rank's part of these is several boxes (`boxes.py`).
    Plans are cached by shapes, so that repeated blocks cost one search.
    """
    if world < 1 or align < 1:
        raise ValueError(f"world and align must be at least 1; got world={world}, align={align}")
    if max_padding < 0 or max_padding_numel < 0:
        raise ValueError(f"padding limits can't be negative; got {max_padding} and {max_padding_numel} elements")
    by_key: dict[Hashable, list[int]] = defaultdict(list)
    for index, spec in enumerate(specs):
        by_key[spec.key].append(index)
    lanes: list[LaneLayout] = []
    for key, indices in by_key.items():
        group = [specs[index] for index in indices]
        limit = max(int(max_padding * sum(spec.numel for spec in group)), max_padding_numel)
        best: tuple[LaneLayout, ...] = ()
        for extents in _granule_choices(group, world, fine_granules):
            fits = _plan_lanes(extents, world, align, limit)
            found = tuple(_lane(key, indices, extents, fit, world) for fit in fits)
            if not best or _padding(found) < _padding(best):
                best = found
            if _padding(best) <= limit:
                break
        lanes.extend(best)
    return UnitLayout(tuple(lanes))


_plan_lanes = lru_cache(maxsize=4096)(plan_lanes)

# Granules to allow, as divisors of a rank's fair share of the elements: 1/64 of a shard wasted is near the 1% limit.
_GRANULE_DIVISORS = (1, 4, 16, 64)


def _granule_choices(specs: Sequence[TensorSpec], world: int, fine_granules: bool) -> Iterator[tuple[Extent, ...]]:
    """Yield the extents of `specs` with coarse granules first, then with finer ones if allowed."""
    yield tuple(Extent(spec.numel, spec.granule) for spec in specs)
    if fine_granules:
        fair_share = sum(spec.numel for spec in specs) // world
        for divisor in _GRANULE_DIVISORS:
            yield tuple(Extent(spec.numel, spec.granule_within(fair_share // divisor)) for spec in specs)


def _padding(lanes: Sequence[LaneLayout]) -> int:
    return sum(lane.padding for lane in lanes)


def _lane(key: Hashable, indices: Sequence[int], extents: Sequence[Extent], fit: LaneFit, world: int) -> LaneLayout:
    tensors = [LaneTensor(indices[place], offset, *extents[place]) for place, offset in fit.offsets]
    # An empty tensor sorts before the one that shares its offset, so that neighbours never overlap.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.numel, tensor.index))
    return LaneLayout(key, tuple(tensors), fit.shard_numel, world)
