"""Machines as numbers: what a vendor's data sheet says of a GPU, and how much of it was reached.

Note [Reached]
From profiles and timings of `benchmarks/run_one.py` on 2 H100 and 2 H200 (torch 2.11, transformers 5.17, eager; work
llama-1b unless said otherwise). Worst and best of what was seen; other machines may lie outside.
* matrix products: 702 to 772 of 989 TFLOP/s over all products of a step;
* attention (head of 64, causal): 284 in backward, 366 TFLOP/s in forward;
* kernels that move memory: 158 GB a step in 61 ms (H200, 0.54) and 73 ms (H100, 0.65); fused AdamW 0.68;
* NCCL: 205 GB/s of 450 for gathers of 122 MB on 2 ranks; 329 to 355 GB/s for an all-reduce of 1 GiB on 2 and 4;
* peer copies: 349 GB/s;
* host, without the runtime: 46 to 82 ms for the 2,043 kernels of a forward of work small-48, 80 to 96 ms for the 3,527
  of its backward; the runtime added 2 to 74 ms for its 435 parameters, and -3 to 43 ms for the 165 of llama-1b-host.
  The spread is between machines of one kind (runs 2, 3, 13 and 14). All four numbers follow the pace of the host:
  where `starts.py` measured 32 us a kernel (27 to 38 in six processes), steps of two works at stages 1 and 3 took 0.65
  to 0.69 of what the middles of the spans give (run 17);
* host, beside other ranks: 128 and 144 us for a gather and a reduction by NCCL, 4.5 ms for what ranks tell each other
  at the end of a backward, with the wait for the slower one (run 12, two ranks);
* a matrix product of 787 TFLOP/s ran at 574 beside NCCL's all-gather (Note [Peer copies] in runtime/peer.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ourshard.runtime.wording import counted
from ourshard.values import nearest

Span = tuple[float, float]  # worst, best

_NO_TIME: Span = (0.0, 0.0)
_OF_HOST = ("forward_call", "backward_call", "unit_call", "leaf_call", "nccl_call", "agreement")
_START = 48e-6  # what `starts.py` would measure on a host in the middle of their spans: Note [Reached]
_START_SPREAD = 0.2  # of what it measures, between processes of one machine
GB = 10**9
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machines of a run. Rates are bytes or operations a second, of one GPU and in one direction."""

    name: str
    gpus: int  # ranks over all nodes
    gpus_per_node: int
    memory: int  # bytes that a process can allocate on a GPU
    flops: float  # of 16-bit matrix products
    memory_rate: float  # of device memory, read and written
    link_rate: float  # to the other GPUs of a node
    network_rate: float  # to other nodes
    disk_rate: float = 3.0 * GB  # of a node's disk; assumed, `--disk` says better
    host_memory: int | None = None  # bytes of a node that its ranks may take together; None: nobody said
    # Of one rank's host memory in an optimizer's step, read and written, with 16 threads beside an H200. With this rate
    # the measured steps are -15% to +15% off: two ranks with 0.6e9 elements each, with and without the next forward
    # beside (runs 14 and 18), one with 1.2e9 beside its forward (15 and 20), one with 5.6e9 and nothing beside (15).
    host_rate: float = 75.0 * GB
    host_link_rate: float = 32.0 * GB  # between a GPU and its host, in one direction
    # What was reached of the rates above, worst and best: Note [Reached].
    matmul_reach: Span = (0.68, 0.78)
    attention_reach: Span = (0.29, 0.42)  # of the rate of matrix products
    memory_reach: Span = (0.54, 0.66)
    nccl_reach: Span = (0.45, 0.75)
    peer_reach: Span = (0.72, 0.80)
    host_link_reach: Span = (0.60, 0.86)  # assumed: PCIe's headers alone take 0.1
    forward_call: Span = (40e-6, 22e-6)  # seconds of the host to start one kernel from a module's forward
    backward_call: Span = (31e-6, 23e-6)  # and from autograd
    unit_call: Span = (190e-6, 10e-6)  # and of the runtime, to gather, use or reduce a unit
    leaf_call: Span = (160e-6, 0.0)  # for each parameter of a unit that is reduced: hooks, and its gradient's copy
    nccl_call: Span = (160e-6, 110e-6)  # to start one of NCCL's collectives
    agreement: Span = (6.0e-3, 3.0e-3)  # for the words of the other ranks at the end of a backward
    nccl_drag: float = 0.37  # how much slower kernels compute while NCCL's run beside them

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"hardware: {counted(self.gpus, 'GPU')}, {self.gpus_per_node} a node; both must be 1 or more."
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"hardware: nodes of {self.gpus_per_node} can't be filled by {counted(self.gpus, 'GPU')}.")

    def starting(self, seconds: float) -> Hardware:
        """Return these machines with a host that starts a kernel in `seconds`, as `start_seconds` measures it."""
        middles = {name: sum(getattr(self, name)) / 2 * seconds / _START for name in _OF_HOST}
        spans = {name: ((1 + _START_SPREAD) * middle, (1 - _START_SPREAD) * middle) for name, middle in middles.items()}
        return self.replace(**spans)

    def replaying(self) -> Hardware:
        """Return these machines as CUDA graphs of whole forwards and backwards see them: the host starts no kernel."""
        return self.replace(**dict.fromkeys(_OF_HOST, _NO_TIME))

    def without_others(self) -> Hardware:
        """Return these machines where all ranks but one are absent, and collectives return at once, as a benchmark can.

        Source: torch's fake process group, whose calls cost the host what a kernel does.
        """
        return self.replace(link_rate=math.inf, nccl_drag=0.0, nccl_call=self.forward_call, agreement=_NO_TIME)

    def holds(self, host_nbytes: int) -> bool:
        """Say whether the host of a node can hold so much for each of its ranks, as far as is known."""
        return self.host_memory is None or host_nbytes * self.ranks_per_node <= self.host_memory

    @property
    def ranks_per_node(self) -> int:
        """Count the ranks that share a node's host memory and its disk."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    def replace(self, **changes: object) -> Hardware:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A data sheet: dense bf16 without sparsity; links in one direction."""

    memory_gb: float
    tflops: float
    memory_tb: float  # TB/s of device memory
    link_gb: float  # GB/s to the GPUs of the node: NVLink, or PCIe where there is none
    network_gb: float  # GB/s of the network card beside the GPU, as in the vendor's own machine
    host_gb: float  # GB/s to the host: 16 lanes of PCIe 5 or 4


_SHEETS: Mapping[str, _Sheet] = {
    "b200": _Sheet(192, 2250, 8.0, 900, 50, 64),
    "h200": _Sheet(150, 989, 4.8, 450, 50, 64),
    "h100": _Sheet(85, 989, 3.35, 450, 50, 64),
    "a100": _Sheet(85, 312, 2.039, 300, 25, 32),
    "a100-40": _Sheet(42, 312, 1.555, 300, 25, 32),
    "l40s": _Sheet(48, 362, 0.864, 32, 25, 32),
    "rtx4090": _Sheet(25, 165, 1.008, 32, 12.5, 32),
}
_OTHERS: Mapping[str, tuple[str, ...]] = {"h100": ("pcie", "nvl"), "h200": ("nvl",), "b200": ("gb200",)}  # other rates
# The driver, the CUDA context and the reserve of the allocator take the rest.
_USABLE = 0.97


def hardware_of(name: str, gpus: int, nodes: int = 1) -> Hardware:
    """Return `gpus` GPUs of a known kind, spread over `nodes`.

    Raises:
        ValueError: the kind is unknown (the nearest name is given), or the GPUs do not fill the nodes.
    """
    if name.lower() not in _SHEETS:
        raise ValueError(f"--gpu: {name!r} is not known.{nearest(name.lower(), _SHEETS)}")
    if nodes < 1 or gpus % nodes:
        raise ValueError(f"hardware: {counted(nodes, 'node')} can't be filled evenly by {counted(gpus, 'GPU')}.")
    sheet = _SHEETS[name.lower()]
    return Hardware(
        name=name.lower(),
        gpus=gpus,
        gpus_per_node=gpus // nodes,
        memory=int(sheet.memory_gb * GB * _USABLE),
        flops=sheet.tflops * 1e12,
        memory_rate=sheet.memory_tb * 1e12,
        link_rate=sheet.link_gb * GB,
        network_rate=sheet.network_gb * GB,
        host_link_rate=sheet.host_gb * GB,
    )


def peak_flops_of(device_name: str) -> float | None:
    """Return the 16-bit operations a second on the data sheet of a GPU, by torch's name for it; None if not known."""
    name = device_name.lower().replace(" ", "")
    words = {kind: (*_OTHERS.get(kind, ()), "mig") for kind in _SHEETS}  # a part of a card has a part of its rate
    kinds = [kind for kind in _SHEETS if kind in name and not any(word in name for word in words[kind])]
    return _SHEETS[max(kinds, key=len)].tflops * 1e12 if kinds else None
