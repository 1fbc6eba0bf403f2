"""Bytes on a device over a rehearsed step, by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ourshard.planning.buffers import windows_nbytes
from ourshard.planning.formulas import Optimizer
from ourshard.planning.layouts import PlannedModel
from ourshard.planning.moves import Does, Move
from ourshard.runtime.ledger import Kind, on_device

# cuBLAS keeps this on Hopper for matrix products (CUDA 13, "cuBLAS workspace": 32 MiB); it counts as allocated.
WORKSPACE = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the moment when most is allocated on its device, at rest, and on the host."""

    masters: int  # and shards in compute dtype: secondary ones, and those of masters on the host
    optimizer: int
    whole: int  # parameters that stay whole
    slots: int  # parameters that are whole for a while
    gradients: int  # at rest and on their way, and residuals of their codec
    activations: int
    workspace: int
    at_rest: int  # between steps
    host: int = 0  # in host memory: masters, gradients, shards, optimizer state, windows of what is on a disk, inputs
    pinned: int = 0  # of these, what the runtime pins where it may: all but the optimizer state
    disk: int = 0  # in files: masters and optimizer state

    @property
    def peak(self) -> int:
        return (
            self.masters + self.optimizer + self.whole + self.slots + self.gradients + self.activations + self.workspace
        )

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak, by name, in the order of the table."""
        return {
            "masters": self.masters,
            "optimizer": self.optimizer,
            "whole": self.whole,
            "slots": self.slots,
            "gradients": self.gradients,
            "activations": self.activations,
            "workspace": self.workspace,
        }


def memory_of(
    planned: PlannedModel,
    moves: Sequence[Move],
    optimizer: Optimizer,
    workspace: int = WORKSPACE,
    inputs: int = 0,
    *,
    offloaded: int = 0,
) -> Memory:
    """Return the memory of a step whose `moves` have settled.

    `inputs` are bytes of a batch on the device, `offloaded` those of inputs of units on the host.
    """
    stepped = [lane for lane in planned.lanes if lane.trainable]
    states = int(sum(lane.master_nbytes for lane in stepped if not lane.on_host) * optimizer.states)
    host_states = int(
        sum(lane.master_nbytes for lane in stepped if lane.on_host and not lane.on_disk) * optimizer.states
    )
    disk_states = int(sum(lane.master_nbytes for lane in stepped if lane.on_disk) * optimizer.states)
    windows = windows_nbytes(planned, optimizer.states)
    alive = [0] * len(moves)  # activations at each move
    latest = 0
    for index, move in enumerate(moves):
        if move.visit is not None:
            alive[index] = move.visit.peak
            latest = move.visit.alive
        elif move.does is Does.STEP:
            latest = 0
            alive[index] = 0
        else:
            alive[index] = latest
    top = max(range(len(moves)), key=lambda index: _engine(moves[index]) + alive[index])
    held = moves[top].held
    return Memory(
        masters=held.get(Kind.MASTER, 0) + held.get(Kind.SHARD, 0) + held.get(Kind.SECONDARY, 0),
        optimizer=states,
        whole=held.get(Kind.FULL, 0),
        slots=held.get(Kind.SLOT, 0),
        gradients=sum(held.get(kind, 0) for kind in (Kind.GRADIENT, Kind.REDUCE, Kind.RESIDUAL)) + moves[top].in_flight,
        activations=alive[top] + inputs,
        workspace=workspace,
        at_rest=_engine(moves[-1]) + states + workspace,
        host=held.get(Kind.HOST, 0) + windows + host_states + offloaded,
        pinned=held.get(Kind.HOST, 0) + windows + offloaded,
        disk=held.get(Kind.DISK, 0) + disk_states,
    )


def _engine(move: Move) -> int:
    return on_device(move.held) + move.in_flight
