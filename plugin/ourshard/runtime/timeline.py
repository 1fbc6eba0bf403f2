"""Where the time of a step went, from what a profiler recorded on one rank. No torch in here.

Note [Shares]
Kernels, or on a CPU ranges and operators, are put into groups. Each moment of a step belongs to the first group of an
order that is at work, or to none, which is the host's gap. On a GPU computation comes first, so that communication has
what it has for itself: what is exposed. On a CPU everything waits for communication, so that comes first; operators
enclose it in backward. `busy` is the time of a group counted alone, also beside others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Span = tuple[float, float]  # start and end, milliseconds

GATHER, REDUCE, GAPS = "gather (NCCL)", "reduce (NCCL)", "gaps of the host"
OTHER = "other compute"
RANGE = "ourshard::"  # what ranges of the engine begin with: `streams.profiler_range`

# The first group whose word is in a kernel's name has it.
GPU_GROUPS = {
    GATHER: ("nccldevkernel_allgather", "ncclkernel_allgather", "nccldevkernel_broadcast"),
    REDUCE: ("nccl",),
    "barriers of peers": ("barrier",),
    "copies between GPUs": ("memcpy ptop", "memcpy peer"),
    "sums of gradients": ("_add_parts",),
    "products and attention": ("gemm", "cutlass", "flash", "nvjet", "sm90_", "sm80_", "fmha", "cublas"),
    "optimizer and norm": ("adam", "multi_tensor", "lpnorm", "foreach"),
    "copies and casts": ("memcpy", "copy", "memset", "fillfunctor"),
}
GPU_ORDER = (
    "products and attention",
    OTHER,
    "optimizer and norm",
    "copies and casts",
    "sums of gradients",
    "copies between GPUs",
    GATHER,
    REDUCE,
    "barriers of peers",
)
# Of a CPU's ranges and operators: the first whose word the name begins with.
CPU_GROUPS = {
    "reduce": (f"{RANGE}reduce", "c10d::reduce_scatter", "c10d::_reduce_scatter", "c10d::allreduce"),
    "gather": (f"{RANGE}gather",),
    "agree": (f"{RANGE}agree",),
    "optimizer": ("Optimizer.",),
    "compute": ("aten::", "autograd::engine::evaluate_function"),
}
CPU_ORDER = tuple(CPU_GROUPS)
# What the groups of both make in a few words; waits and gaps are exposed by what they are.
PARTS = {
    "compute": ("compute", "products and attention", OTHER, "copies and casts"),
    "exposed gather": ("gather", GATHER, "copies between GPUs"),
    "exposed reduce": ("reduce", REDUCE, "sums of gradients", "barriers of peers"),
    "optimizer": ("optimizer", "optimizer and norm"),
    "agreements of the host": ("agree",),
    GAPS: (GAPS,),
}


@dataclass(frozen=True, slots=True)
class Shares:
    """Milliseconds a step: of the step, of each group alone in Note [Shares], and of each counted for itself."""

    step_ms: float
    share_ms: dict[str, float]
    busy_ms: dict[str, float]

    def parts(self) -> dict[str, float]:
        """Return the shares in the words of `PARTS`, without those that this kind of device does not have."""
        found = {}
        for part, groups in PARTS.items():
            known = [self.share_ms[group] for group in groups if group in self.share_ms]
            if known:
                found[part] = sum(known)
        return found


def gpu_group_of(name: str) -> str:
    """Return the group of a kernel or copy."""
    lowered = name.lower()
    return next((group for group, words in GPU_GROUPS.items() if any(word in lowered for word in words)), OTHER)


def cpu_group_of(name: str) -> str | None:
    """Return the group of a range or operator; None for what is none of a step's."""
    return next((group for group, words in CPU_GROUPS.items() if name.startswith(words)), None)


def shares(
    spans: Mapping[str, Iterable[Span]], order: tuple[str, ...], steps: int, whole: Span | None = None
) -> Shares:
    """Give each moment to the first group of `order` at work, between the first and the last span or in `whole`."""
    taken: list[Span] = []
    alone: dict[str, float] = {}
    for group in order:
        before = length(taken)
        taken = union([*taken, *spans.get(group, [])])
        alone[group] = (length(taken) - before) / steps
    if whole is None:
        whole = (taken[0][0], taken[-1][1]) if taken else (0.0, 0.0)
    total = (whole[1] - whole[0]) / steps
    alone[GAPS] = max(0.0, total - length(taken) / steps)
    return Shares(total, alone, {group: length(spans.get(group, [])) / steps for group in order})


def union(spans: Iterable[Span]) -> list[Span]:
    """Return sorted spans that do not overlap and cover the same time."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
