"""Which gradients are not finite: as backward makes them, on the rank whose batch it was, and once they are reduced.

Where the forward was not finite already, every gradient is bad, the last layer's first: then the unit counts whose
result was the first to be so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.unit import Unit
from ourshard.runtime.wording import shorten


class GradientWatch:
    """Looks at each gradient of this rank as it arrives, and at what units return, for the time of one step.

    A reduction mixes the ranks, and a gradient that is not finite spoils those of all layers before: only here can be
    told where it began. The flags stay on the device until `bad`.
    """

    def __init__(self, engine: Engine) -> None:
        self._seen: list[tuple[str, torch.Tensor]] = []  # in the order of backward
        self._returned: list[tuple[str, torch.Tensor]] = []  # by units, in the order of forward
        self._hooks: list[Any] = []
        self._engine = engine
        engine.output_watch = self._look_at_output
        for lane in trained_lanes(engine):
            for position, leaf in enumerate(lane.leaves):
                if leaf.requires_grad:
                    self._hooks.append(leaf.register_hook(partial(self._look, _where(lane, position))))

    def _look(self, where: str, gradient: torch.Tensor) -> None:
        self._seen.append((where, torch.isfinite(gradient).all()))

    def _look_at_output(self, unit: Unit, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            recorded = tensor.is_cuda and torch.cuda.is_current_stream_capturing()  # a replay does not come here
            if tensor.requires_grad and not recorded:  # not masks, which may be infinite
                self._returned.append((unit.label, torch.isfinite(tensor.detach()).all()))

    def end(self) -> None:
        """Look no longer."""
        self._engine.output_watch = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def bad(self) -> list[str]:
        """Return the parameters whose gradients were not finite, the first in backward first; the host waits once."""
        return _flagged(self._seen)

    def bad_forward(self) -> str:
        """Return the first unit that returned what is not finite, or nothing; the host waits once."""
        return next(iter(_flagged(self._returned)), "")


def _flagged(seen: list[tuple[str, torch.Tensor]]) -> list[str]:
    flags = torch.stack([flag for _, flag in seen]).tolist() if seen else []
    return [where for (where, _), finite in zip(seen, flags, strict=True) if not finite]


def find(engine: Engine, watch: GradientWatch) -> str | None:
    """Return what all ranks found, the same on each; None if all is finite. Collective over the host."""
    lanes = list(trained_lanes(engine))
    made = watch.bad()
    clean = not made and finite([values for lane in lanes for values in _left(lane)])
    if not engine.control.any_of([not clean], "sentinel: gradients")[0]:
        return None
    held = [where for lane in lanes for where in _bad_in(lane)]
    told: list[Any] = engine.control.gather_objects((made, held, watch.bad_forward()), "sentinel: which gradients")
    began = [_began(rank, made, forward) for rank, (made, _, forward) in enumerate(told) if made]
    if began:
        clean_ranks = [rank for rank, (made, *_) in enumerate(told) if not made]
        rest = f"; those of ranks {clean_ranks} were finite before the reduction" if clean_ranks else ""
        return f"gradients are not finite, {', '.join(began)}{rest}.{_stepped(engine)}"
    found = [f"rank {rank} holds {shorten(held)}" for rank, (_, held, _) in enumerate(told) if held]
    own = "though all ranks' own were before the reduction"
    return f"gradients are not finite, {own}: {'; '.join(found)}.{_stepped(engine)}"


def _stepped(engine: Engine) -> str:
    """Say that it is too late, where units are stepped while backward runs."""
    if engine.in_backward is None:
        return ""
    return " Units were stepped with them already (optimizer_in_backward): go on from a checkpoint."


def _began(rank: int, bad: list[str], forward: str) -> str:
    """Say where it began on a rank."""
    if forward:
        return f"on rank {rank} from its forward on, where {forward} is the first unit whose result is not"
    distinct = list(dict.fromkeys(bad))  # one for each micro-batch
    return f"first on rank {rank}: {distinct[0]}" + (f" and {len(distinct) - 1} after it" if len(distinct) > 1 else "")


def trained_lanes(engine: Engine) -> list[Lane]:
    return [lane for lane in engine.lanes() if lane.trainable]


def gradients(lane: Lane) -> dict[int, torch.Tensor]:
    """Return this rank's part of the gradients of a lane, by position in it."""
    if lane.placement.whole:
        found = {position: tensor.grad for position, tensor in enumerate(lane.resting)}
        return {position: gradient for position, gradient in found.items() if gradient is not None}
    if lane.gradient is None or not lane.accumulated:
        return {}
    positions = [position for position, valid in enumerate(lane.valid) if valid and lane.rows(position).rows]
    return {position: lane.rows_view(lane.gradient, position) for position in positions}


def _left(lane: Lane) -> list[torch.Tensor]:
    """Return the gradients of a lane, or the norm of those that backward has stepped and let go."""
    return list(gradients(lane).values()) if lane.spent_norm is None else [lane.spent_norm]


def _bad_in(lane: Lane) -> list[str]:
    if lane.spent_norm is not None:
        return [] if finite([lane.spent_norm]) else [f"unit {lane.unit.label}"]
    return [_where(lane, position) for position, gradient in gradients(lane).items() if not finite([gradient])]


def _where(lane: Lane, position: int) -> str:
    return f"{lane.name_of(position)} (unit {lane.unit.label})"


def finite(tensors: list[torch.Tensor]) -> bool:
    """Say whether all elements are finite; the host waits once."""
    if not tensors:
        return True
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all())
