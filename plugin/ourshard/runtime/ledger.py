"""Counts of what moved and what was held: bytes and calls per collective, gathers per unit, peak bytes by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What a buffer is for; all but `HOST`, `STATES`, `DISK` and `INPUTS` are on the device."""

    SLOT = "slot"  # whole parameters of a unit, for as long as it computes
    FULL = "full"  # whole parameters that stay
    MASTER = "master"  # what the optimizer updates, and the stored shards of frozen parameters
    GRADIENT = "gradient"  # gradients at rest
    REDUCE = "reduce"  # gradients on their way through a reduction
    SHARD = "shard"  # shards in compute dtype of lanes whose masters are on the host
    SECONDARY = "secondary"  # shards in compute dtype within a node: Note [Secondary shard]
    RESIDUAL = "residual"  # what codecs lost of gradients, for the next reduction: Note [Error feedback]
    HOST = "host"  # masters, gradients and shards on the host, and windows to a disk; not in the totals
    STATES = "states"  # what optimizers keep one value an element of, on the host; not in the totals
    DISK = "disk"  # masters and optimizer state on a disk; not in the totals
    INPUT = "input"  # inputs of recomputed units, on their way to the host or back: Note [Inputs on the host]
    INPUTS = "inputs"  # memory for such inputs on the host; not in the totals


_ELSEWHERE = (Kind.HOST, Kind.STATES, Kind.DISK, Kind.INPUTS)


def on_device(held: Mapping[Kind, int]) -> int:
    """Return the bytes of all kinds that are on the device."""
    return sum(nbytes for kind, nbytes in held.items() if kind not in _ELSEWHERE)


@dataclass(slots=True)
class Ledger:
    """Mutable counters. `wire` counts bytes that one rank sends (or receives) in ring algorithms.

    Bytes on the wire, per rank, of a buffer of b bytes over n ranks: all-gather and reduce-scatter
    b (n - 1) / n, all-reduce twice that (Thakur et al., 2005, "Optimization of collective communication
    operations in MPICH").
    """

    wire: Counter[str] = field(default_factory=Counter)  # "all_gather/shard" -> bytes
    calls: Counter[str] = field(default_factory=Counter)
    gathers: Counter[str] = field(default_factory=Counter)  # unit name -> gathers
    reduces: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)  # bytes of inputs "to host" and "from host"
    trace: list[str] | None = None  # the order of collectives, when asked for
    _held: Counter[Kind] = field(default_factory=Counter)
    _peak: Counter[Kind] = field(default_factory=Counter)
    _peak_total: int = 0

    def collective(self, name: str, axis: str, nbytes: int) -> None:
        """Count one collective that puts `nbytes` of this rank on the wire."""
        key = f"{name}/{axis}"
        self.wire[key] += nbytes
        self.calls[key] += 1

    def note(self, text: str) -> None:
        """Add a line to the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(text)

    def hold(self, kind: Kind, nbytes: int) -> None:
        """Count `nbytes` more (or, if negative, less) of `kind` as held."""
        self._held[kind] += nbytes
        self._peak[kind] = max(self._peak[kind], self._held[kind])
        self._peak_total = max(self._peak_total, self.held_total)

    def counts(self, since: tuple[Counter[str], ...] | None = None) -> tuple[Counter[str], ...]:
        """Return what was counted so far, or since."""
        now = tuple(Counter(counter) for counter in (self.wire, self.calls, self.gathers, self.reduces))
        return now if since is None else tuple(a - b for a, b in zip(now, since, strict=True))

    def add(self, counts: tuple[Counter[str], ...], sign: int = 1) -> None:
        """Count again what `counts` returned, since a graph did it; or, with -1, take it back."""
        for counter, more in zip((self.wire, self.calls, self.gathers, self.reduces), counts, strict=True):
            counter.update({name: sign * number for name, number in more.items()})

    @property
    def held(self) -> dict[str, int]:
        """Bytes held now, by kind."""
        return {kind.value: self._held[kind] for kind in Kind}

    @property
    def held_total(self) -> int:
        return on_device(self._held)

    @property
    def peak(self) -> dict[str, int]:
        """Most bytes held at once since the last `reset`, by kind."""
        return {kind.value: self._peak[kind] for kind in Kind}

    @property
    def peak_total(self) -> int:
        return self._peak_total

    @property
    def wire_total(self) -> int:
        return sum(self.wire.values())

    def reset(self) -> None:
        """Forget counts and peaks; what is held stays."""
        for counter in (self.wire, self.calls, self.gathers, self.reduces, self.copied):
            counter.clear()
        self._peak = Counter(self._held)
        self._peak_total = self.held_total
        if self.trace is not None:
            self.trace.clear()
