"""A step of a rank without data: what it computes, sends, holds and lets go, in the order of the runtime.

Note [Rehearsal]
The order of gathers and reductions is the runtime's own: its `Schedule` runs here, with nobody to agree with. Around
it this file follows `unit.py`, `lane.py` and `engine.py` in one respect each: when a unit is whole, which buffers a
lane holds, and what the phases open and close. A test compares the result with the ledger and the trace of real ranks,
so that the two can't drift apart unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ourshard.config import Accumulate, ShardConfig
from ourshard.planning.buffers import (
    arriving_kind,
    at_rest,
    cast_nbytes,
    leaf_nbytes,
    peer_nbytes,
    refilled_nbytes,
    sent_nbytes,
    summed_nbytes,
    travel_nbytes,
    waiting_nbytes,
)
from ourshard.planning.coded import coded_reduction, messages_nbytes, residual_nbytes
from ourshard.planning.layouts import PlannedLane, PlannedModel, PlannedUnit
from ourshard.planning.moves import Collective, Does, MeshSizes, Move
from ourshard.planning.trace import Visit
from ourshard.runtime.in_backward import REDUCTIONS
from ourshard.runtime.ledger import Kind
from ourshard.runtime.mesh import gathers_in_two_hops
from ourshard.runtime.placement import At
from ourshard.runtime.schedule import Action, Event, Schedule

BUFFERS_IN_FLIGHT = 2  # units whose reductions may be under way: `InFlight.keep`, on GPUs


@dataclass(slots=True)
class _Lane:
    """The buffers of one lane that come and go."""

    planned: PlannedLane
    arriving: int = 0  # bytes in the ledger; 0 when there is none
    lent: bool = False  # `arriving` is in the peers' arena, which is counted once
    gradient: bool = False  # there is a reduced gradient
    waiting: bool = False  # there is a sum that waits for a sync, or, on the host, memory for one


@dataclass(slots=True)
class _Unit:
    """The state of one unit, as `runtime.unit.Unit` has it."""

    planned: PlannedUnit
    index: int
    lanes: list[_Lane]
    whole: bool = False
    is_ahead: bool = False
    held: bool = False
    has_secondary: bool = False  # its secondary shard shows the masters
    stale: bool = True  # nothing that rests shows the masters
    running: bool = False
    calls: int = 0  # forwards whose backward is still to come
    reduced: bool = False
    is_pending: bool = True  # its backward is still to come; always true of the root
    in_flight: int = 0

    @property
    def label(self) -> str:
        return self.planned.label

    @property
    def sharded(self) -> bool:
        return self.planned.sharded

    @property
    def rooted(self) -> bool:
        return self.planned.rooted

    @property
    def trainable(self) -> bool:
        return any(lane.planned.trainable for lane in self.lanes)

    def release_unused(self) -> None:
        """Do nothing: every unit is used."""


class _Nobody:
    """Stands for the other ranks, which agree to everything."""

    world = 2
    is_silent = True  # every unit is used, so that ranks need not meet
    host_waits = False

    def agree(self, label: str) -> None:
        """Agree."""

    def agree_on(self, wish: str, prefix: str) -> list[str]:
        """Wish the same."""
        return [wish]

    def declare(self, label: str) -> None:
        """Begin the same."""

    def confirm(self) -> None:
        """Have begun the same."""


@dataclass
class Rehearsal:
    """A step of `planned` on one rank: Note [Rehearsal]. `visits` are of one micro-batch."""

    planned: PlannedModel
    config: ShardConfig
    mesh: MeshSizes
    visits: Sequence[Visit]
    micro_batches: int = 1
    clip: bool = True
    buffers_in_flight: int = BUFFERS_IN_FLIGHT  # 1 on a CPU, where a reduction is over when it is issued
    peer: bool = False  # gathers and reductions go by copy engines: Note [Peer copies] in runtime/peer.py
    moves: list[Move] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # gathers and reductions, as the ledger's trace writes them

    def __post_init__(self) -> None:
        self._units = [
            _Unit(unit, index, [_Lane(lane) for lane in unit.lanes]) for index, unit in enumerate(self.planned.units)
        ]
        self._root = self._units[-1]
        self._rooted = [self._root, *(unit for unit in self._units[:-1] if unit.planned.rooted)]
        self._backward = False
        self._sync = True
        self._pending: list[int] = []  # bytes of the buffers of reductions that compute has not waited for
        self._held: Counter[Kind] = Counter(at_rest(self.planned.lanes))
        self._held[Kind.RESIDUAL] += sum(residual_nbytes(lane, self.mesh, self.config) for lane in self.planned.lanes)
        self._pulled = 0  # bytes of what was pulled from peers; the buffer stays
        self._staging, self._arena = peer_nbytes(self.planned, self.mesh.shard) if self.peer else (0, 0)
        self._held[Kind.REDUCE] += 2 * self._staging + self._arena
        self._reduced: list[_Unit] = []  # to be stepped in this backward: Note [Steps in backward] in in_backward.py
        self._behind: dict[int, int] = {}  # unit -> bytes of masters that an overlapped step is over with, in its order
        if self.config.offload.overlap_step:
            for unit in dict.fromkeys(unit.index for unit in (*self._rooted, *self._units)):
                masters = [lane.master_nbytes for lane in self._units[unit].planned.lanes if lane.on_host]
                self._behind[unit] = sum(masters) + max(self._behind.values(), default=0)
        nobody: Any = _Nobody()
        units: Any = self._units
        self._schedule = Schedule(nobody, units, self._perform)

    # ---- the step ------------------------------------------------------------------------------------------

    def step(self) -> list[Move]:
        """Run one optimizer step and return its moves; the first one records, the later ones follow the record."""
        self.moves, self.order = [], []
        for number in range(self.micro_batches):
            self._sync = number == self.micro_batches - 1
            self._forward()
            self._run_backward()
        self._optimize()
        return self.moves

    def settled(self) -> list[Move]:
        """Return the moves of a step after the first two, when buffers and the order have settled."""
        self.step()
        self.step()
        return self.step()

    def _forward(self) -> None:
        refilled = sum(refilled_nbytes(lane) for unit in self.planned.units for lane in unit.lanes)
        self._move(Does.COPY, self._root, nbytes=refilled)
        for unit in self._units:
            unit.is_pending = True
        self._schedule.begin(("forward", True), self.config.prefetch.forward)
        for unit in self._rooted:
            self._require(unit)
            unit.held = True
        for visit in self._visits(backward=False):
            unit = self._units[visit.unit]
            if not unit.planned.rooted:
                self._require(unit)
                unit.calls += 1
            self._move(Does.COMPUTE, unit, visit=visit)
            if not unit.planned.rooted and not unit.planned.kept:
                self._release(unit)
        self._schedule.end()

    def _run_backward(self) -> None:
        self._backward = True
        for unit in self._units:
            unit.reduced = False
        self._schedule.begin(("backward", self._sync), self.config.prefetch.backward)
        for unit in self._rooted:
            self._require(unit)
        for visit in self._visits(backward=True):
            unit = self._units[visit.unit]
            if not unit.running and not unit.planned.rooted:
                self._require(unit)
                unit.running = True
            self._move(Does.COMPUTE, unit, visit=visit)  # what it makes of gradients counts in the visit
            unit.in_flight = sum(leaf_nbytes(lane.planned) for lane in unit.lanes)
            for rooted in (self._units[index] for index in visit.graded):
                rooted.in_flight = sum(leaf_nbytes(lane.planned) for lane in rooted.lanes)
                self._reduce_or_keep(rooted)
            unit.calls = max(0, unit.calls - 1)
            if not unit.planned.rooted and visit.bounded and not unit.calls:
                self._leave(unit)
        for unit in (*reversed(self._units[:-1]), self._root):
            if self._reduces_now(unit) and (not unit.reduced or unit.in_flight):
                self._schedule.need(Action.REDUCE, unit)  # type: ignore[arg-type]
        self._schedule.end()
        for unit in self._units:
            self._put_aside(unit)
        self._backward = False
        self._pending.clear()
        self._reduced.clear()
        self._move(Does.JOIN, self._root)
        for unit in self._units:
            unit.held = unit.running = False
            unit.calls = 0
            self._release(unit)

    def _visits(self, backward: bool) -> Iterable[Visit]:
        return (visit for visit in self.visits if visit.backward is backward)

    def _leave(self, unit: _Unit) -> None:
        """Follow `Unit.after_backward`."""
        unit.running = unit.is_pending = False
        self._reduce_or_keep(unit)
        self._release(unit)

    def _reduce_or_keep(self, unit: _Unit) -> None:
        if self._reduces_now(unit):
            self._schedule.need(Action.REDUCE, unit)  # type: ignore[arg-type]  # the schedule asks only for `index`
        else:
            self._put_aside(unit)

    def _optimize(self) -> None:
        lanes = [lane.planned for unit in self._units for lane in unit.lanes if self._is_left(lane)]
        masters = sum(lane.master_nbytes for lane in lanes if not lane.on_host)
        host = sum(lane.master_nbytes for lane in lanes if lane.on_host)
        if self.clip and not self.config.optimizer_in_backward:
            # The step divides, and writes what it divided: Note [Late division] in runtime/gradient_notes.py. The norm
            # reads every gradient on the device, but what peers reduced: Note [Known norms] in runtime/norms.py.
            self._move(Does.COPY, self._root, nbytes=(1 if self.peer else 2) * masters, host_nbytes=host)
        disk = sum(lane.master_nbytes for lane in lanes if lane.on_disk)
        stored = sum(lane.read_nbytes for lane in lanes)
        waited, behind = (0, host) if self._behind else (host, 0)
        self._move(
            Does.STEP,
            self._root,
            nbytes=masters,
            host_nbytes=waited,
            disk_nbytes=disk,
            stored_nbytes=stored,
            behind_nbytes=behind,
        )
        for unit in self._units:
            for lane in unit.lanes:
                self._zero_grad(lane)
        for unit in self._units:
            if any(not lane.direct for lane in unit.planned.lanes):
                unit.whole = unit.has_secondary = False
                unit.stale = True
        for unit in (self._root, *self._units[:-1]):
            if not unit.planned.sharded:
                self._gather(unit)
        self._move(Does.REST, self._root)

    def _is_left(self, lane: _Lane) -> bool:
        """Say whether `optimizer.step()` steps a lane: no backward has."""
        return lane.planned.trainable and (
            lane.gradient or lane.planned.direct or not self.config.optimizer_in_backward
        )

    def _zero_grad(self, lane: _Lane) -> None:
        """Free the reduced gradient; whole ones, and those on the host, stay."""
        if lane.gradient and not lane.planned.placement.whole and not lane.planned.on_host:
            lane.gradient = False
            self._held[Kind.GRADIENT] -= lane.planned.master_nbytes

    # ---- whole parameters ----------------------------------------------------------------------------------

    def _require(self, unit: _Unit) -> None:
        """Follow `Unit.require`."""
        if not unit.whole:
            if unit.planned.sharded:
                self._schedule.need(Action.GATHER, unit)  # type: ignore[arg-type]
            else:
                self._gather(unit)
        elif unit.planned.sharded:
            self._schedule.passed(unit)  # type: ignore[arg-type]
        unit.is_ahead = False
        self._move(Does.USE, unit)

    def _perform(self, event: Event) -> None:
        unit = self._units[event.unit]
        self.order.append(f"{event.action.value} {unit.planned.label}")
        if event.action is Action.GATHER:
            self._gather(unit)
        else:
            self._reduce(unit)

    def _gather(self, unit: _Unit) -> None:
        if unit.whole:
            return
        unit.whole = unit.is_ahead = True
        self._held[Kind.SLOT] += unit.planned.slot_nbytes
        if unit.has_secondary:
            calls = tuple(Collective("all_gather", "node", lane.full_nbytes) for lane in unit.planned.sharded_lanes)
            self._move(Does.GATHER, unit, collectives=calls)
            return
        calls = tuple(call for lane in unit.planned.lanes for call in self._lane_gather(lane, unit.stale))
        behind = self._behind.get(unit.index, 0) if unit.stale else 0
        unit.stale = False
        secondary = sum(lane.secondary_nbytes for lane in unit.planned.lanes)
        unit.has_secondary = secondary > 0
        cast = sum(cast_nbytes(lane) for lane in unit.planned.lanes) + 2 * secondary
        message = max((self._message_nbytes(lane) for lane in unit.planned.lanes), default=0)
        self._held[Kind.SLOT] += message  # while the gather runs
        read = sum(lane.read_nbytes for lane in unit.planned.lanes)
        self._move(Does.GATHER, unit, collectives=calls, nbytes=cast, disk_nbytes=read, behind_nbytes=behind)
        self._held[Kind.SLOT] -= message

    def _lane_gather(self, lane: PlannedLane, stale: bool) -> Iterator[Collective]:
        if lane.replicas > 1 and stale:
            yield Collective("all_gather", "replicate", lane.shard_numel * lane.compute_nbytes)
        nbytes = lane.coded_nbytes or lane.full_nbytes
        if self._gathers_in_two_hops and not lane.placement.whole:
            yield Collective("all_gather", "cross", nbytes // self.mesh.node)
            yield Collective("all_gather", "node", nbytes)
        elif not lane.placement.whole and self.mesh.shard > 1:
            yield Collective("all_gather", "shard", nbytes)

    def _message_nbytes(self, lane: PlannedLane) -> int:
        """Return what a gather of a lane holds beside the slot: messages, and what came between two hops."""
        if lane.placement.whole or not self._gathers_in_two_hops:
            return lane.coded_nbytes
        return lane.coded_nbytes + (lane.coded_nbytes or lane.full_nbytes) // self.mesh.node

    @property
    def _gathers_in_two_hops(self) -> bool:
        return gathers_in_two_hops(self.config, self.mesh.node, self.mesh.cross)

    def _release(self, unit: _Unit) -> None:
        """Follow `Unit.release`."""
        if unit.held or not unit.whole or not unit.planned.sharded:
            return
        unit.whole = False
        self._held[Kind.SLOT] -= unit.planned.slot_nbytes

    # ---- gradients -----------------------------------------------------------------------------------------

    def _reduces_now(self, unit: _Unit) -> bool:
        return any(lane.planned.trainable and self._lane_reduces_now(lane.planned) for lane in unit.lanes)

    def _lane_reduces_now(self, lane: PlannedLane) -> bool:
        sharded = lane.placement.grads is At.SHARD and self.config.accumulate is Accumulate.SHARDED
        return self._sync or sharded

    def _put_aside(self, unit: _Unit) -> None:
        if unit.in_flight:
            for lane in unit.lanes:
                self._take(unit, lane, reduce_next=False)
            unit.in_flight = 0

    def _take(self, unit: _Unit, lane: _Lane, reduce_next: bool) -> None:
        """Follow `Lane.take_gradients`."""
        planned = lane.planned
        if not planned.trainable:
            return
        width = self._width(planned) if reduce_next and not planned.direct else planned.store_nbytes
        if not lane.arriving and not lane.lent:
            lane.lent = reduce_next and self.peer and not unit.planned.rooted and not planned.placement.whole
            if not lane.lent:
                lane.arriving = planned.numel * width
                self._held[arriving_kind(planned)] += lane.arriving
        if reduce_next and planned.replicas > 1 and not self._sync:
            if not lane.waiting:
                self._hold_waiting(lane, 1)
        elif reduce_next and not planned.direct and not lane.gradient:
            lane.gradient = True
            self._held[Kind.HOST if planned.on_host else Kind.GRADIENT] += planned.master_nbytes
        self._move(Does.COPY, unit, nbytes=leaf_nbytes(planned) + planned.numel * width)

    def _reduce(self, unit: _Unit) -> None:
        """Follow `Unit.reduce` and `Lane.reduce`."""
        unit.reduced = True
        due = [lane for lane in unit.lanes if lane.planned.trainable and self._lane_reduces_now(lane.planned)]
        for lane in unit.lanes:
            self._take(unit, lane, reduce_next=lane in due)
        unit.in_flight = 0
        buffers = sum(sent_nbytes(lane.planned) for lane in due if not lane.lent)
        pulled = sum(lane.planned.numel * self._width(lane.planned) for lane in due if lane.lent)
        self._pulled = max(self._pulled, pulled * (self.mesh.shard - 1) // self.mesh.shard)
        calls: list[Collective] = []
        most = 0  # held while one lane's messages are
        for lane in due:
            calls += self._lane_reduction(lane)
            most = max(
                most, self._held[Kind.REDUCE] + messages_nbytes(lane.planned, self.mesh, self.config, sync=self._sync)
            )
        summed = sum(summed_nbytes(lane.planned) for lane in due)
        after = self._held[Kind.REDUCE]
        self._held[Kind.REDUCE] = max(most, after)
        leaves = sum(parameter.requires_grad for parameter in unit.planned.parameters)
        self._move(Does.REDUCE, unit, collectives=tuple(calls), nbytes=summed, leaves=leaves)
        self._held[Kind.REDUCE] = after
        self._pending.append(buffers)
        if len(self._pending) > self.buffers_in_flight:
            self._pending.pop(0)
            self._move(Does.BOUND, unit)
        self._step_in_backward(unit)

    def _step_in_backward(self, unit: _Unit) -> None:
        """Follow `StepsInBackward.reduced`."""
        if not (self.config.optimizer_in_backward and self._sync):
            return
        self._reduced.append(unit)
        while len(self._reduced) > (REDUCTIONS if self.buffers_in_flight > 1 else 0):
            over = self._reduced.pop(0)
            lanes = [lane for lane in over.lanes if lane.gradient and not lane.planned.placement.whole]
            if lanes and not over.planned.rooted:
                masters = sum(lane.planned.master_nbytes for lane in lanes)
                self._move(Does.COPY, over, nbytes=masters)  # the norm reads them
                self._move(Does.STEP_UNIT, over, nbytes=masters)
                for lane in lanes:
                    self._zero_grad(lane)

    def _width(self, lane: PlannedLane) -> int:
        """Return the bytes of an element of a gradient on its way."""
        peers = self.peer and self.mesh.replicate == 1 and not lane.placement.whole
        return travel_nbytes(lane) if peers else lane.reduce_nbytes

    def _lane_reduction(self, lane: _Lane) -> list[Collective]:
        planned = lane.planned
        nbytes = planned.numel * self._width(planned)
        if not planned.direct:
            self._held[arriving_kind(planned)] -= lane.arriving
            lane.arriving, lane.lent = 0, False
        if planned.placement.whole:
            calls = [Collective("all_reduce", "world", nbytes)]
        else:
            calls = [Collective("reduce_scatter", "shard", nbytes)]
            if planned.is_coded:
                calls = coded_reduction(planned, self.mesh, self.config, sync=self._sync)
            elif self._sync:
                name = "reduce_scatter" if planned.replicas > 1 else "all_reduce"
                calls.append(Collective(name, "replicate", planned.shard_numel * planned.reduce_nbytes))
            if self._sync and lane.waiting and not planned.on_host:
                self._hold_waiting(lane, -1)
        return [call for call in calls if self.mesh.of(call.axis) > 1]

    def _hold_waiting(self, lane: _Lane, sign: int) -> None:
        lane.waiting = sign > 0
        self._held[Kind.HOST if lane.planned.on_host else Kind.GRADIENT] += sign * waiting_nbytes(lane.planned)

    def _move(
        self,
        does: Does,
        unit: _Unit,
        collectives: tuple[Collective, ...] = (),
        nbytes: int = 0,
        visit: Visit | None = None,
        **more: int,
    ) -> None:
        """Add a move and what is held from then on; `more` are the other numbers that a move names."""
        in_flight = sum(other.in_flight for other in self._units) + sum(self._pending) + self._pulled
        held = dict(self._held)
        self.moves.append(Move(does, unit.index, held, in_flight, collectives, nbytes, visit, **more))
