"""Search the smallest shard that takes a set of tensors, and split the set into lanes where one pads too much.

The rules for cuts are Note [Cut congruence] in `layout.py`. All sizes are elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_LANES = 3
# More granules than this are merged before partitions are tried: 5 have 41 partitions into at most three lanes.
MAX_CLASSES = 5
# Gaps that later tensors may fill. They come from aligning a tensor with a cut, so few are open at a time.
MAX_HOLES = 8


class Extent(NamedTuple):
    """What the search knows of a tensor."""

    numel: int
    granule: int


class _Item(NamedTuple):
    """An extent to place: `step` is lcm(granule, align), `position` its place in the caller's list."""

    numel: int
    granule: int
    step: int
    position: int


@dataclass(frozen=True, slots=True)
class LaneFit:
    """A found lane: the shard size, and (position, offset) of each tensor."""

    shard_numel: int
    offsets: tuple[tuple[int, int], ...]


def plan_lanes(extents: tuple[Extent, ...], world: int, align: int, limit: int) -> tuple[LaneFit, ...]:
    """Return the fewest lanes whose padding is within `limit` elements; past `MAX_LANES`, those with the least padding.

    A lane more is opened only if that brings the padding within `limit`, or saves more than `limit`.
    """
    items = [_Item(*extent, math.lcm(extent.granule, align), place) for place, extent in enumerate(extents)]
    splitter = _Splitter(items, world, align)
    best, best_padding = splitter.best_of(1)
    for lanes in range(2, min(MAX_LANES, len(splitter.classes)) + 1):
        if best_padding <= limit:
            break
        split, padding = splitter.best_of(lanes)
        if padding <= limit or best_padding - padding > limit:
            best, best_padding = split, padding
    return best


class _Splitter:
    """Tries partitions of the tensors into lanes; a lane's fit is searched once however many partitions share it."""

    def __init__(self, items: Sequence[_Item], world: int, align: int) -> None:
        self.world = world
        self.align = align
        self.total = sum(item.numel for item in items)
        # A tensor within one shard is crossed at most once and never binds the shard size; nor does a granule that
        # divides `align`. These go wherever there is room.
        small = self.total // world
        self.easy = [item for item in items if item.numel <= small or self.align % item.granule == 0]
        hard = [item for item in items if item.numel > small and self.align % item.granule]
        self.classes = _granule_classes(hard) or [[]]
        self.fits: dict[tuple[int, ...], LaneFit] = {}

    def best_of(self, lanes: int) -> tuple[tuple[LaneFit, ...], int]:
        """Return the split into `lanes` lanes with the least padding, and that padding."""
        best: tuple[LaneFit, ...] = ()
        best_padding = -1
        for blocks in _partitions(len(self.classes), lanes):
            for host in range(lanes):
                fits = tuple(self._fit(block, easy=number == host) for number, block in enumerate(blocks))
                padding = sum(fit.shard_numel for fit in fits) * self.world - self.total
                if best_padding < 0 or padding < best_padding:
                    best, best_padding = fits, padding
        return best, best_padding

    def _fit(self, block: tuple[int, ...], easy: bool) -> LaneFit:
        key = (int(easy), *block)
        if key not in self.fits:
            items = [item for number in block for item in self.classes[number]]
            self.fits[key] = smallest_fit(items + self.easy if easy else items, self.world, self.align)
        return self.fits[key]


def _granule_classes(items: Sequence[_Item]) -> list[list[_Item]]:
    """Group tensors by granule, then merge the pair with the smallest common multiple until few enough are left."""
    by_granule: dict[int, list[_Item]] = defaultdict(list)
    for item in items:
        by_granule[item.step].append(item)
    while len(by_granule) > MAX_CLASSES:
        steps = sorted(by_granule)
        pairs = [(math.lcm(low, high), low, high) for place, low in enumerate(steps) for high in steps[place + 1 :]]
        common, low, high = min(pairs)
        merged = by_granule.pop(low) + by_granule.pop(high)
        by_granule[common] = merged + by_granule.get(common, [])
    return [by_granule[step] for step in sorted(by_granule)]


def _partitions(count: int, blocks: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every partition of range(count) into exactly `blocks` blocks, in a fixed order."""

    def grow(labels: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        used = max(labels, default=-1) + 1
        if len(labels) == count:
            if used == blocks:
                yield labels
            return
        for label in range(min(used + 1, blocks)):
            yield from grow((*labels, label))

    for labels in grow(()):
        yield tuple(tuple(i for i, label in enumerate(labels) if label == block) for block in range(blocks))


def smallest_fit(items: Sequence[_Item], world: int, align: int) -> LaneFit:
    """Return the smallest shard found that takes `items`.

    Climbs a ladder of shard sizes until the tensors fit, then bisects the last rung. Fitting is not monotonic in the
    shard size, so a smaller one may exist that neither met.
    """
    orders = _orders(items)
    lower = max(align, _round_up(-(-sum(item.numel for item in items) // world), align))
    tolerance = max(align, lower // 8192)
    failed, fit = 0, None
    for shard in _ladder(items, lower, align):
        fit = _fit_any(orders, shard, world, align)
        if fit is not None:
            break
        failed = shard
    assert fit is not None, f"the last rung holds every tensor in one shard, yet {items} did not fit"
    while failed and fit.shard_numel - failed > tolerance:
        middle = _next_shard(items, _round_up((failed + fit.shard_numel) // 2, align), align)
        if middle >= fit.shard_numel:
            # Nothing to try in the upper half: look at the next candidate after the last failure instead.
            middle = _next_shard(items, failed + align, align)
            if middle >= fit.shard_numel:
                break
        better = _fit_any(orders, middle, world, align)
        failed, fit = (middle, fit) if better is None else (failed, better)
    return fit


def _ladder(items: Sequence[_Item], lower: int, align: int) -> list[int]:
    """Return shard sizes to try, rising from `lower` to one that holds every tensor at once.

    Beside doubling distances it has the next multiples of the granules of all tensors longer than a shard, and of half
    one: where these divide the shard, such tensors go anywhere, and a close fit is the rule.
    """
    whole = sum(_round_up(item.numel, align) for item in items) + align
    rungs = {_next_shard(items, lower, align), _next_shard(items, max(lower, whole), align)}
    distance = align
    while lower + distance < whole:
        rungs.add(_next_shard(items, lower + distance, align))
        distance *= 2
    for shortest in (lower, lower // 2):
        stride = math.lcm(align, *(item.granule for item in items if item.numel > shortest))
        rungs.update(_round_up(lower, stride) + stride * count for count in range(3))
    return sorted(rungs)


def _next_shard(items: Sequence[_Item], shard: int, align: int) -> int:
    """Return the next shard size from `shard` that the granules of all tensors longer than two shards divide."""
    candidates = [shard, *(_round_up(-(-item.numel // 2), align) for item in items if item.numel > 2 * shard)]
    best = 0
    for start in sorted(set(candidates)):
        if best and start >= best:
            break
        bound = math.lcm(align, *(item.granule for item in items if item.numel > 2 * start))
        found = _round_up(start, bound)
        best = min(best, found) if best else found
    return best


def _orders(items: Sequence[_Item]) -> list[list[_Item]]:
    """Return the orders to try: large granules first keeps equal rows together; large tensors first packs best."""
    by_granule = sorted(items, key=lambda item: (-item.granule, -item.numel, item.position))
    by_numel = sorted(items, key=lambda item: (-item.numel, -item.granule, item.position))
    return [by_granule] if by_granule == by_numel else [by_granule, by_numel]


def _fit_any(orders: Sequence[Sequence[_Item]], shard: int, world: int, align: int) -> LaneFit | None:
    for items in orders:
        offsets = _place(items, shard, world * shard, align)
        if offsets is not None:
            return LaneFit(shard, tuple(offsets))
    return None


def _place(items: Sequence[_Item], shard: int, lane: int, align: int) -> list[tuple[int, int]] | None:
    """Place `items` in order, each in the first hole that takes it or at the end; None if they pass `lane` elements."""
    offsets: list[tuple[int, int]] = []
    holes: list[tuple[int, int]] = []
    end = 0
    for item in items:
        hole = _take_hole(item, holes, shard, align)
        if hole is not None:
            offsets.append((item.position, hole))
            continue
        start = _first_start(item, end, shard, align)
        if start is None or start + item.numel > lane:
            return None
        if start - end >= align and len(holes) < MAX_HOLES:
            holes.append((_round_up(end, align), start))
        offsets.append((item.position, start))
        end = start + item.numel
    return offsets


def _take_hole(item: _Item, holes: list[tuple[int, int]], shard: int, align: int) -> int | None:
    for number, (hole_start, hole_stop) in enumerate(holes):
        if item.numel > hole_stop - hole_start:
            continue
        start = _first_start(item, hole_start, shard, align)
        if start is not None and start + item.numel <= hole_stop:
            # What lies before `start` is lost; that is less than one row.
            holes[number] = (_round_up(start + item.numel, align), hole_stop)
            return start
    return None


def _first_start(item: _Item, position: int, shard: int, align: int) -> int | None:
    """Return the first start at or after `position` where no cut splits a row; None if no start can do."""
    start = _round_up(position, align)
    if start + item.numel <= (start // shard + 1) * shard:
        return start
    if shard % item.granule == 0:
        return _round_up(start, item.step)
    # The tensor may be crossed once. Where that fails from here it may succeed from the next cut, where a whole shard
    # lies ahead; after that every shard looks the same.
    for _ in range(2):
        cut = (start // shard + 1) * shard
        crossing = cut - (cut - start) // item.step * item.step
        if crossing < cut and crossing + item.numel <= cut + shard:
            return crossing
        if item.numel <= shard:
            return cut
        start = cut
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
