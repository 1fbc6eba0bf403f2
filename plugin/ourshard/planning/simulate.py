"""How long a rehearsed step takes: streams, links and the host as clocks.

Four clocks run: the host, which queues everything in order; the compute stream; the gather and reduce streams, which
wait for compute as it is when they are issued (Note [Streams] in runtime/streams.py); and the wire, which carries one
collective at a time, since all of them go through the same communicators. Inputs of units that go to the host and back
have a link and a clock of their own; what goes with the optimizer is taken for hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ourshard.planning.formulas import (
    Group,
    Optimizer,
    Reach,
    all_reduce_seconds,
    copy_seconds,
    host_copy_seconds,
    kernel_seconds,
    ring_seconds,
)
from ourshard.planning.hardware import Hardware
from ourshard.planning.moves import Collective, Does, MeshSizes, Move
from ourshard.planning.trace import Visit


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step of one rank."""

    total: float
    compute: float  # kernels of the model
    step: float  # clipping and the optimizer
    exposed: float  # compute waited for the wire, or for inputs from the host
    starved: float  # compute waited for the host
    wire: float  # collectives, overlapped or not


def group_of(axis: str, mesh: MeshSizes, hardware: Hardware) -> Group:
    """Return the ranks of an axis and how many of them share a node; ranks of one shard group are neighbours."""
    node = hardware.gpus_per_node
    if axis == "shard":
        return Group(mesh.shard, min(mesh.shard, node))
    if axis == "node":
        return Group(mesh.node, min(mesh.node, node))
    if axis == "cross":
        return Group(mesh.cross, min(mesh.cross, max(1, node // mesh.node)))
    if axis == "replicate":
        return Group(mesh.replicate, min(mesh.replicate, max(1, node // mesh.shard)))
    return Group(mesh.world, min(mesh.world, node))


def call_seconds(call: Collective, mesh: MeshSizes, hardware: Hardware, reach: Reach, *, peer: bool = False) -> float:
    """Return the time of one collective alone; with `peer` copy engines move it."""
    group = group_of(call.axis, mesh, hardware)
    if call.name == "all_reduce":
        return all_reduce_seconds(call.whole_nbytes, group, hardware, reach)
    return ring_seconds(call.whole_nbytes, group, hardware, reach, peer=peer)


def simulate(
    moves: Sequence[Move],
    mesh: MeshSizes,
    hardware: Hardware,
    optimizer: Optimizer,
    reach: Reach = Reach.MIDDLE,
    *,
    peer: bool = False,
) -> Timing:
    """Time a step in the middle of a run: the moves are played three times, and the last is measured.

    With `peer` the shard axis moves by copy engines, which leave the multiprocessors to the model; NCCL's kernels slow
    those that run beside them.
    """
    clocks = _Clocks(mesh, hardware, optimizer, reach, peer)
    for _ in range(2):
        clocks.play(moves)
    before = clocks.snapshot()
    clocks.play(moves)
    after = clocks.snapshot()
    return Timing(**{name: after[name] - before[name] for name in after})


@dataclass
class _Clocks:
    """The clocks, and what is counted on the way."""

    mesh: MeshSizes
    hardware: Hardware
    optimizer: Optimizer
    reach: Reach
    peer: bool
    host: float = 0.0
    compute: float = 0.0
    wire: float = 0.0
    begun: float = 0.0  # when the last step was
    copied: float = 0.0  # when inputs that go to the host or come back have arrived
    disk: float = 0.0  # when it has read what was asked for
    gathered: dict[int, float] = field(default_factory=dict)  # unit -> when its gather is over
    reduced: list[float] = field(default_factory=list)  # ends of reductions that nobody waited for
    computed: float = 0.0
    stepped: float = 0.0
    exposed: float = 0.0
    starved: float = 0.0
    sent: float = 0.0
    dragging: float = 0.0  # seconds of NCCL's kernels that compute has not been slowed for
    moving: float = 0.0  # seconds of kernels that move memory beside compute, which it has not been delayed by
    _visits: dict[int, tuple[float, float]] = field(default_factory=dict)

    def play(self, moves: Sequence[Move]) -> None:
        """Let the clocks run through `moves`."""
        for move in moves:
            if move.does in (Does.GATHER, Does.USE, Does.REDUCE):
                self.host += self.reach.of(self.hardware.unit_call)
            self.host += move.leaves * self.reach.of(self.hardware.leaf_call)
            self._acts[move.does](self, move)

    def snapshot(self) -> dict[str, float]:
        return {
            "total": self.compute,
            "compute": self.computed,
            "step": self.stepped,
            "exposed": self.exposed,
            "starved": self.starved,
            "wire": self.sent,
        }

    def _send(self, start: float, calls: Sequence[Collective]) -> float:
        """Put collectives on the wire; return when the last one is over."""
        end = start
        for call in calls:
            self.host += self._start_seconds(call)
            seconds = self._seconds(call)
            end = max(end, self.wire) + seconds
            self.wire = end
            self.sent += seconds
        return end

    def _start_seconds(self, call: Collective) -> float:
        """Return what the host takes to start a collective: by peer copies as many calls as Note [Peer copies] has."""
        if not self._by_peers(call):
            return self.reach.of(self.hardware.nccl_call)
        around = 2 if call.name == "all_gather" else 3  # staging, or the sum; and barriers
        return (around + self.mesh.shard - 1) * self.reach.of(self.hardware.forward_call)

    def _by_peers(self, call: Collective) -> bool:
        return self.peer and call.axis == "shard" and call.name != "all_reduce"

    def _seconds(self, call: Collective) -> float:
        peer = self._by_peers(call)
        seconds = call_seconds(call, self.mesh, self.hardware, self.reach, peer=peer)
        self.dragging += 0.0 if peer else seconds
        return seconds

    def _issue(self) -> float:
        """Return when a stream that waits for compute can begin."""
        return max(self.compute, self.host)

    def _wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.compute)
        self.compute = max(self.compute, until)

    def _gather(self, move: Move) -> None:
        if move.behind_nbytes:  # the host waits for the unit's step: Note [Overlapped steps] in runtime/behind.py
            self.host = max(self.host, self.begun + self._host_seconds(move.behind_nbytes))
        cast = self._beside(move.nbytes)
        self.gathered[move.unit] = self._send(self._read(move.disk_nbytes) + cast, move.collectives)

    def _host_seconds(self, nbytes: int) -> float:
        """Return what the CPU takes to step masters of `nbytes`."""
        return nbytes * self.optimizer.moved / self.hardware.host_rate

    def _read(self, nbytes: int) -> float:
        """Return when a gather can begin that reads `nbytes` of a disk; reads begin as soon as the disk is free."""
        issued = self._issue()
        if nbytes:
            self.disk += nbytes * self.hardware.ranks_per_node / self.hardware.disk_rate
        return max(issued, self.disk)

    def _reduce(self, move: Move) -> None:
        end = self._send(self._issue(), move.collectives)
        self.reduced.append(end + self._beside(move.nbytes))

    def _beside(self, nbytes: int) -> float:
        """Return what kernels take that move memory on another stream than the model's."""
        seconds = copy_seconds(nbytes, self.hardware, self.reach)
        self.moving += seconds
        return seconds

    def _use(self, move: Move) -> None:
        self._wait(self.gathered.pop(move.unit, 0.0))

    def _run(self, move: Move) -> None:
        assert move.visit is not None
        device, host = self._visit_seconds(move.visit)
        slowed = min(self.dragging, device)
        self.dragging -= slowed
        delayed = min(self.moving, device)
        self.moving -= delayed
        device += slowed * self.hardware.nccl_drag + delayed
        if move.visit.awaits:
            self._wait(self.copied)
        begin = max(self.compute, self.host)
        if move.visit.copied:
            copying = host_copy_seconds(move.visit.copied, self.hardware, self.reach)
            self.copied = max(self.copied, begin) + copying
        self.starved += max(0.0, self.host - self.compute)
        self.host += host
        self.compute = max(begin + device, self.host)
        self.starved += self.compute - begin - device
        self.computed += device

    def _visit_seconds(self, visit: Visit) -> tuple[float, float]:
        known = self._visits.get(id(visit))
        if known is None:
            seconds = sum(
                count * kernel_seconds(kernel, self.hardware, self.reach) for kernel, count in visit.kernels.items()
            )
            call = self.reach.of(self.hardware.backward_call if visit.backward else self.hardware.forward_call)
            known = self._visits[id(visit)] = (seconds, visit.calls * call)
        return known

    def _copy(self, move: Move) -> None:
        self.compute += copy_seconds(move.nbytes, self.hardware, self.reach)
        self.compute += move.host_nbytes / self.hardware.host_rate

    def _bound(self, move: Move) -> None:
        self._wait(self.reduced.pop(0))

    def _join(self, move: Move) -> None:
        if self.mesh.world > 1:
            self.host += self.reach.of(self.hardware.agreement)
        self._wait(max(self.reduced, default=0.0))
        self.reduced.clear()
        self.dragging = self.moving = 0.0  # what is over slows nothing

    def _step(self, move: Move) -> None:
        device = copy_seconds(int(move.nbytes * self.optimizer.moved), self.hardware, self.reach)
        host = self._host_seconds(move.host_nbytes)
        self.begun = max(self.compute, self.host)
        moved = 2 * move.disk_nbytes * (1 + self.optimizer.states) + move.stored_nbytes
        disk = moved * self.hardware.ranks_per_node / self.hardware.disk_rate
        seconds = max(device, host, disk)  # side by side
        self.compute += seconds
        self.disk = self.compute
        self.stepped += seconds

    def _step_unit(self, move: Move) -> None:
        seconds = copy_seconds(int(move.nbytes * self.optimizer.moved), self.hardware, self.reach)
        self.compute += seconds
        self.stepped += seconds

    def _rest(self, move: Move) -> None:
        """Take no time."""

    _acts: Mapping[Does, Callable[[_Clocks, Move], None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._acts = {
            Does.GATHER: _Clocks._gather,
            Does.REDUCE: _Clocks._reduce,
            Does.USE: _Clocks._use,
            Does.COMPUTE: _Clocks._run,
            Does.COPY: _Clocks._copy,
            Does.BOUND: _Clocks._bound,
            Does.JOIN: _Clocks._join,
            Does.STEP_UNIT: _Clocks._step_unit,
            Does.STEP: _Clocks._step,
            Does.REST: _Clocks._rest,
        }
