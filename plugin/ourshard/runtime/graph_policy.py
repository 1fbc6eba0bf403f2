"""When a forward and its backward run as CUDA graphs, and when not. Nothing of CUDA is in here.

Note [Captured steps]
---------------------
What is captured: all that a forward of the root does on the GPU, and all that its backward does, gathers, reductions
and casts included, as one graph each. A step is then two launches and the optimizer. Losses, outputs and gradients are
those of an eager step; what an eager step leaves on the host (which gradients exist, what is whole) is put there too.

A forward is captured once `WARMUP` eager ones had the same key: shapes and dtypes of tensors, the values of all else,
autocast.
On a replay Python of the model does not run. So a forward stays eager where it must, or may, do something else:

* without gradients, in an evaluation, or inside of another forward (a checkpoint around the model);
* with inputs that need gradients, are on the host, or are no tensors and no plain values;
* where gradients add up: in `no_sync`, or on those of an earlier backward that were not set to None;
* under anomaly detection and `Join`; with hooks of the user on submodules or parameters;
* while the backward of the last replay has not run, whose activations are in the graph's memory;
* where ranks use different parameters.

Ranks tell each other what they are about to do, and all run eagerly where they differ. All captures are dropped when
what they rest on has changed: `train()` and `eval()`, `requires_grad`, dtypes, masters or buffers that were replaced.
A capture that fails (a read of a value on the host, a checkpoint that saves the state of random numbers) is not tried
again, and rank 0 says why. No more than `MOST` keys are captured: each holds its activations.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

WARMUP = 3  # eager steps with a key before it is captured: orders are recorded, kernels compiled, memory is known
MOST = 3  # keys that are captured

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)

Captured = TypeVar("Captured")


class Way(Enum):
    """How a forward runs."""

    EAGER = "eager"  # as without graphs
    CAPTURE = "capture"  # captured, then replayed
    REPLAY = "replay"  # an earlier capture is replayed


@dataclass(frozen=True, slots=True)
class Call:
    """What a forward was called with, taken apart: `key` is what must be the same for a replay."""

    key: tuple[Any, ...]
    leaves: list[Any]
    spec: TreeSpec

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Call | str:
    """Return the inputs of a forward, or why they can't be those of a graph on `device`."""
    leaves, spec = tree_flatten((args, kwargs))
    key: list[Any] = [repr(spec), torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                return "an input needs a gradient"
            if leaf.device != device:
                return f"an input is on {leaf.device}"
            key.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, _PLAIN):
            key.append((type(leaf), leaf))
        else:
            return f"an input is a {type(leaf).__name__}, neither a tensor nor a plain value"
    return Call(tuple(key), leaves, spec)


class Policy(Generic[Captured]):
    """Which keys were seen, are captured, or are not to be: Note [Captured steps]."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._captured: dict[tuple[Any, ...], Captured] = {}
        self._refused: dict[tuple[Any, ...], str] = {}
        self._state: Any = None

    def follow(self, state: Any) -> bool:
        """Drop all captures if what they rest on is not as it was; return whether any were."""
        changed, self._state = self._state != state, state
        dropped = changed and bool(self._captured)
        if changed:
            self._seen.clear()
            self._captured.clear()
            self._refused.clear()
        return dropped

    def way(self, key: tuple[Any, ...]) -> tuple[Way, str]:
        """Return how a forward with this key runs, and, where it stays eager, why."""
        if key in self._captured:
            return Way.REPLAY, ""
        if key in self._refused:
            return Way.EAGER, self._refused[key]
        if self._seen[key] < WARMUP:
            return Way.EAGER, ""
        if len(self._captured) >= MOST:
            return Way.EAGER, f"{MOST} other shapes are captured"
        return Way.CAPTURE, ""

    def count(self, key: tuple[Any, ...]) -> None:
        """Note an eager forward, with a backward to come."""
        self._seen[key] += 1

    def keep(self, key: tuple[Any, ...], captured: Captured) -> None:
        self._captured[key] = captured

    def refuse(self, key: tuple[Any, ...], why: str) -> None:
        self._refused[key] = why

    def captured(self, key: tuple[Any, ...]) -> Captured:
        return self._captured[key]

    def all_captured(self) -> Sequence[Captured]:
        return list(self._captured.values())


def number_of(key: tuple[Any, ...]) -> int:
    """Return a number that stands for a key in what ranks tell each other."""
    return zlib.crc32(repr(key).encode())
