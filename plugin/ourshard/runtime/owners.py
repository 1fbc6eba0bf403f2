"""Optimizers that need whole matrices: each parameter is stepped whole, on one rank of its shard group.

Note [Owners]
-------------
Between steps nothing differs from Note [Runs] in run.py: the groups hold this rank's rows, and norms, clipping and
loss scaling see the rows of gradients. Only, each parameter is a run of its own, and has an owner, chosen by bytes.
Before a step, one uneven all-to-all a lane brings the rows of master and gradient to the owners; there the run shows
the whole parameter and gradient for the time of the step, and the other ranks show no gradient, so that the optimizer
skips it. After the step a second all-to-all takes the changed rows back. State is whole, and lives with the owner.

A rank sends 2 b (the rows of masters and gradients, of b bytes, that it does not own) there, and gets b back.

Where an optimizer is known to keep nothing for all of its parameters together, it steps one lane after the other
(Note [Steps by lane] in lane_step.py): while it does, the next lane is on its way to the owners, and the one before on
its way back, so that three lanes at most are whole. Others step once, with all lanes whole; all-to-alls overlap each
other alone. Lanes whose masters rest on a disk come one at a time, while the next is read; what owners keep of whole
parameters stays in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ourshard.runtime.collectives import Arrival
from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.lane_step import StepByLane, showing
from ourshard.runtime.ledger import Kind

if TYPE_CHECKING:
    from ourshard.runtime.mesh import Axis
    from ourshard.runtime.run import Run


def assign_owners(runs: Sequence[Run]) -> None:
    """Give each run that has none an owner: the largest first, to the rank that owns the fewest bytes.

    All ranks come to the same result, whatever rows they hold. Ranks count within those that have parts of the masters.
    """
    loads: dict[tuple[Engine, Axis], list[int]] = {}
    for run in runs:
        owned = loads.setdefault((run.lane.unit.engine, run.lane.spread), [0] * run.lane.spread.size)
        if run.owner is not None:
            owned[run.owner] += _whole_nbytes(run)
    for run in sorted((run for run in runs if run.owner is None), key=_size_then_place):
        owned = loads[run.lane.unit.engine, run.lane.spread]
        run.owner = owned.index(min(owned))
        owned[run.owner] += _whole_nbytes(run)


def _whole_nbytes(run: Run) -> int:
    return run.lane.layout.tensors[run.positions[0]].numel * run.lane.store_dtype.itemsize


def _size_then_place(run: Run) -> tuple[int, ...]:
    unit = run.lane.unit
    return (-_whole_nbytes(run), unit.engine.order, unit.index, unit.lanes.index(run.lane), run.positions[0])


def lend_whole(runs: Sequence[Run]) -> Iterator[Loan]:
    """Begin to bring the runs with a gradient, a lane at a time, to their owners. Collective over the shard axis."""
    by_lane: dict[Lane, list[Run]] = {}
    for run in runs:
        by_lane.setdefault(run.lane, []).append(run)
    for lane, several in by_lane.items():
        lane.forget_released()
        valid = sorted((run for run in several if lane.valid[run.positions[0]]), key=lambda run: run.positions[0])
        if valid:
            yield Loan(lane, valid)


class StepByOwner(StepByLane):
    """One step of whole parameters, lane by lane: Note [Owners]."""

    def __init__(self, optimizer: Optimizer, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._loans: list[Loan] = []
        super().__init__(optimizer, list(dict.fromkeys(run.lane for run in runs)))

    def end(self) -> None:
        super().end()
        for loan in self._loans:
            loan.abandon()
        self._loans.clear()

    def _step_lanes(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        self._step_in_memory(optimizer, step)
        for engine in dict.fromkeys(lane.unit.engine for lane in self._lanes if lane.on_disk):
            lanes = [lane for lane in self._lanes if lane.on_disk and lane.unit.engine is engine]
            self._step_from_disk(engine, lanes, optimizer, step)

    def _step_from_disk(
        self, engine: Engine, lanes: Sequence[Lane], optimizer: Optimizer, step: Callable[[Any], Any]
    ) -> None:
        """Step lanes while they pass through memory; the next is read meanwhile."""
        assert engine.disk is not None
        with closing(engine.disk.bring(optimizer, lanes, together=True)) as passing:
            for lane, master in passing:
                for loan in lend_whole([run for run in self._runs if run.lane is lane]):
                    try:
                        loan.open()
                        with showing(optimizer, loan.parameters):
                            step(optimizer)
                        loan.give_back()
                        loan.close()
                    finally:
                        loan.abandon()  # while the lane is in its window
                self._send_up(lane, master)

    def _step_in_memory(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        coming = self._lend()
        loan, last = next(coming, None), None
        while loan is not None:
            after = next(coming, None)
            loan.open()
            with showing(optimizer, loan.parameters):
                step(optimizer)
            loan.give_back()
            if last is not None:
                last.close()
            loan, last = after, loan
        if last is not None:
            last.close()

    def _lend(self) -> Iterator[Loan]:
        for loan in lend_whole([run for run in self._runs if not run.lane.on_disk]):
            self._loans.append(loan)
            yield loan


class Loan:
    """The whole parameters of one lane that are with their owners for the time of a step: Note [Owners].

    On its way from the start; `open`, `give_back` and `close` follow, in this order and collectively.
    """

    def __init__(self, lane: Lane, runs: list[Run]) -> None:
        self._lane = lane
        self._runs = runs
        self._axis = lane.spread
        self._in_order = sorted(range(lane.spread.size), key=lane.parts.__getitem__)  # ranks, by the rows they have
        self._rows = [run.parameter.data for run in runs]
        self._gradients = [run.parameter.grad for run in runs]  # kept: the lane's gradient lives in them
        self._mine = [run for run in runs if run.owner == self._axis.rank]
        self._nbytes = sum(_whole_nbytes(run) for run in self._mine)
        self._is_open = False
        sent = {owner: list(self._both_rows(owner)) for owner in self._ranks}
        self._counts = [2 * self._numel(self._axis.rank, rank) for rank in self._ranks]
        self._arrival = self._exchange(sent, self._counts)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the optimizer that are stepped while it is open."""
        return [run.parameter for run in self._runs]

    def open(self) -> None:
        """Let runs show whole parameters on their owners, and no gradient elsewhere."""
        received = self._whole_pieces()
        self._is_open = True
        for run in self._runs:
            run.parameter.grad = None
        for run in self._mine:
            shape = self._lane.parameters[run.positions[0]].shape
            gradient, whole = (torch.cat(pieces).view(shape) for pieces in received[run.positions[0]])
            run.parameter.data = whole
            run.parameter.grad = gradient
        self._hold(1)

    def _whole_pieces(self) -> dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return, by position, the pieces of gradient and master of what this rank owns, in the order of rows."""
        found: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        received = self._arrived()
        for rank in self._in_order:
            flat, start = received[rank], 0
            for run in self._owned_by(self._axis.rank):
                pair = found.setdefault(run.positions[0], ([], []))
                for pieces in pair:
                    numel = self._rows_numel(run, rank)
                    pieces.append(flat[start : start + numel])
                    start += numel
        return found

    @property
    def _ranks(self) -> range:
        return range(self._axis.size)

    def _both_rows(self, owner: int) -> Iterator[torch.Tensor]:
        for run, gradient in zip(self._runs, self._gradients, strict=True):
            if run.owner == owner and run.stop > run.start:
                assert gradient is not None, "a parameter with a gradient was not handed out"
                yield gradient
                yield run.parameter.data

    def give_back(self) -> None:
        """Begin to take the changed rows back to the ranks that hold them, and let the runs show rows."""
        sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        for run in self._mine:
            flat, start = run.parameter.data.reshape(-1), 0
            for rank in self._in_order:
                numel = self._rows_numel(run, rank)
                sent[rank].append(flat[start : start + numel])
                start += numel
        self._counts = [self._numel(owner, self._axis.rank) for owner in self._ranks]
        self._arrival = self._exchange(sent, self._counts)
        self.abandon()

    def close(self) -> None:
        """Take the changed rows in."""
        for owner, flat in enumerate(self._arrived()):
            start = 0
            for run in self._owned_by(owner):
                numel = self._rows_numel(run, self._axis.rank)
                if numel:
                    run.parameter.data.copy_(flat[start : start + numel])
                start += numel

    def abandon(self) -> None:
        """Let the runs show this rank's rows again, as they were before the step. Local, idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        for run, rows, gradient in zip(self._runs, self._rows, self._gradients, strict=True):
            run.parameter.grad = None
            run.parameter.data = rows
            run.parameter.grad = gradient
        self._hold(-1)

    def _owned_by(self, owner: int) -> list[Run]:
        return [run for run in self._runs if run.owner == owner]

    def _rows_numel(self, run: Run, rank: int) -> int:
        position = run.positions[0]
        layout = self._lane.layout
        return layout.rows_on(position, self._lane.parts[rank]).numel(layout.tensors[position].granule)

    def _numel(self, owner: int, rank: int) -> int:
        """Count the elements on `rank` of what `owner` owns."""
        return sum(self._rows_numel(run, rank) for run in self._owned_by(owner))

    def _exchange(self, sent: dict[int, list[torch.Tensor]], counts: list[int]) -> Arrival:
        """Begin to send each rank its tensors, and to receive `counts` elements from each."""
        lane = self._lane
        lengths = [sum(tensor.numel() for tensor in sent[rank]) for rank in self._ranks]
        leaving = torch.empty(sum(lengths), dtype=lane.store_dtype, device=lane.device)
        tensors = [tensor for rank in self._ranks for tensor in sent[rank]]
        for place, tensor in zip(leaving.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
            place.copy_(tensor)
        collectives = lane.unit.engine.collectives
        return collectives.exchange(leaving, lengths, counts, self._axis, f"step of {lane.unit.label}")

    def _arrived(self) -> Sequence[torch.Tensor]:
        """Return, by rank, what came from each, where the master is."""
        return self._arrival.wait().to(self._lane.master.device).split(self._counts)

    def _hold(self, sign: int) -> None:
        ledger = self._lane.unit.engine.ledger
        if ledger is not None:
            host = self._lane.offloaded
            ledger.hold(Kind.HOST if host else Kind.MASTER, sign * self._nbytes)
            ledger.hold(Kind.HOST if host else Kind.GRADIENT, sign * self._nbytes)
