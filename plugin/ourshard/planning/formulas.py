"""The formulas of the planner, each with its source. Seconds, bytes, elements.

Bytes on the wire are in `moves.py`, the layout of lanes is the runtime's own, and activations and FLOPs are counted on
a fake run (`trace.py`); what is left is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ourshard.planning.hardware import Hardware, Span
from ourshard.planning.moves import ring_nbytes
from ourshard.planning.trace import Kernel

# Latencies of NCCL's own cost model for the Simple protocol (src/graph/tuning.cc, `baseLatencies` and `hwLatencies`):
# once a collective, and for each step of a ring or a tree that stays in a node or leaves it.
BASE_SECONDS = 8.4e-6
LINK_STEP_SECONDS = 3.4e-6
TREE_LINK_STEP_SECONDS = 4.0e-6
NETWORK_STEP_SECONDS = 14.0e-6

# A kernel that moves next to nothing still takes this long on the device (launch and drain).
SMALLEST_KERNEL_SECONDS = 2.0e-6


class Reach(Enum):
    """Where in the span of what was measured: at its ends, or in the middle."""

    WORST = "worst"
    MIDDLE = "middle"
    BEST = "best"

    def of(self, span: Span) -> float:
        worst, best = span
        return {"worst": worst, "middle": (worst + best) / 2, "best": best}[self.value]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective: how many, and how many of them share a node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


def ring_seconds(whole_nbytes: int, group: Group, hardware: Hardware, reach: Reach, *, peer: bool = False) -> float:
    """Return the time of an all-gather or reduce-scatter of `whole_nbytes`.

    A ring passes b (n - 1) / n bytes over each link (Thakur et al., 2005). NCCL lays one ring through each network card
    of a node, so that a link between nodes carries the part of one of the `per_node` ranks. The slower kind of link
    decides, and each of the n - 1 steps adds its latency (NCCL, src/graph/tuning.cc). With `peer` the copy engines of
    the GPUs of a node move the same bytes.
    """
    if group.ranks == 1 or whole_nbytes == 0:
        return 0.0
    sent = ring_nbytes(whole_nbytes, group.ranks)
    reached = reach.of(hardware.peer_reach if peer else hardware.nccl_reach)
    inside = sent / (hardware.link_rate * reached) if group.per_node > 1 else 0.0
    between = sent / group.per_node / (hardware.network_rate * reached)
    outer_steps = group.nodes - 1
    inner_steps = group.ranks - 1 - outer_steps
    latency = BASE_SECONDS + inner_steps * LINK_STEP_SECONDS + outer_steps * NETWORK_STEP_SECONDS
    return latency + max(inside, between if group.nodes > 1 else 0.0)


def all_reduce_seconds(nbytes: int, group: Group, hardware: Hardware, reach: Reach) -> float:
    """Return the time of an all-reduce: the better of two passes of a ring and of a double tree.

    A tree's latency grows with the logarithm of the nodes (NCCL, src/graph/tuning.cc: twice, up and down); its links
    carry each byte twice (Sanders et al., 2009, "Two-tree algorithms for full bandwidth broadcast, reduction, scan").
    """
    ring = 2 * ring_seconds(nbytes, group, hardware, reach)
    if group.nodes == 1 or nbytes == 0:
        return ring
    reached = reach.of(hardware.nccl_reach)
    inside = 2 * nbytes / (hardware.link_rate * reached) if group.per_node > 1 else 0.0
    between = 2 * nbytes / group.per_node / (hardware.network_rate * reached)
    up = (group.per_node - 1) * TREE_LINK_STEP_SECONDS + math.log2(group.nodes) * NETWORK_STEP_SECONDS
    return min(ring, BASE_SECONDS + 2 * up + max(inside, between))


def kernel_seconds(kernel: Kernel, hardware: Hardware, reach: Reach) -> float:
    """Return the device time of one kernel: the longer of computing and moving (Williams et al., 2009, "Roofline")."""
    span = hardware.attention_reach if kernel.attention else hardware.matmul_reach
    computing = kernel.flops / (hardware.flops * reach.of(span))
    moving = kernel.nbytes / (hardware.memory_rate * reach.of(hardware.memory_reach))
    return max(computing, moving, SMALLEST_KERNEL_SECONDS)


def copy_seconds(nbytes: int, hardware: Hardware, reach: Reach) -> float:
    """Return the time to read and write `nbytes` of device memory, both counted."""
    return nbytes / (hardware.memory_rate * reach.of(hardware.memory_reach))


def host_copy_seconds(nbytes: int, hardware: Hardware, reach: Reach) -> float:
    """Return the time of copies of `nbytes` between a GPU and pinned memory of its host, one after the other."""
    return nbytes / (hardware.host_link_rate * reach.of(hardware.host_link_reach))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps and moves for each element that it steps, as multiples of the master's size."""

    states: float  # kept between steps
    moved: float  # read and written in a step, gradient and master included


# AdamW keeps two moments; a fused step reads master, gradient and moments, and writes all but the gradient. SGD with
# momentum keeps one buffer; plain SGD none.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(states=2, moved=7),
    "momentum": Optimizer(states=1, moved=5),
    "sgd": Optimizer(states=0, moved=3),
}


def checkpoint_nbytes(store_nbytes: int, optimizer: Optimizer) -> int:
    """Return the bytes of a sharded checkpoint: masters and optimizer state, each element once."""
    return int(store_nbytes * (1 + optimizer.states))
