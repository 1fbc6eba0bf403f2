"""A lane's part in an optimizer: what the groups of an optimizer have in the place of parameters.

Note [Runs]
-----------
An optimizer is given parameters of the model; those that are handles are replaced, in place, by runs: one flat tensor
for all neighbouring parameters of one lane in one group. Parameters of which this rank holds no rows belong to the
run beside them, so that all ranks see the same gradients come and go; where a rank holds none of a group's rows in a
lane, its run is one element that stays zero (an empty tensor breaks some optimizers). The group dicts keep their
identity, so schedulers and users who hold them see no change. A run is one tensor as long as all of its parameters
have gradients in the same steps; when they differ (a branch that a step does not use) it is split, with its state, so
that the optimizer skips exactly the parameters that it would skip in one process. State with a layout of the
optimizer's own, as scales of blocks, can't be cut: such a step is refused.
"""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from ourshard.runtime.handle import GET_GRAD, SET_GRAD
from ourshard.runtime.states import refuse_to_cut
from ourshard.runtime.wording import shorten

if TYPE_CHECKING:
    from ourshard.runtime.gradient_notes import GradientNotes
    from ourshard.runtime.lane import Lane


class FlatParameter(nn.Parameter):
    """What an optimizer has of a run: whoever asks for its gradient finds it as users left it, and may write to it.

    So what waits for the step is done first (Note [Late division] in gradient_notes.py), and what is known of the
    gradient is forgotten (Note [Known norms] in norms.py). Copies are plain parameters.
    """

    notes: GradientNotes | None = None

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        notes = self.notes
        if notes is not None and (notes.norms is not None or notes.divisor is not None):
            notes.is_seen()
        found: torch.Tensor | None = GET_GRAD(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.notes is not None and value is not None:
            self.notes.is_seen()
        SET_GRAD(self, value)

    @grad.deleter
    def grad(self) -> None:
        SET_GRAD(self, None)

    def detach(self) -> torch.Tensor:
        """Return what torch does, of this class: `nn.Parameter(parameter)` asks for that."""
        return torch.Tensor.detach(self).as_subclass(FlatParameter)

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(torch.Tensor.detach(self), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = deepcopy(self._plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


getattr(_optimizer, "_foreach_supported_types", []).append(FlatParameter)  # torch looks for types, not for instances


class Run:
    """Neighbouring parameters of one lane as one flat tensor of this rank's rows: Note [Runs]."""

    __slots__ = (
        "group",
        "handed_out",
        "is_all",
        "is_every",
        "lane",
        "optimizer",
        "owner",
        "parameter",
        "positions",
        "start",
        "stop",
        "uneven",
        "version",
    )

    def __init__(self, lane: Lane, positions: list[int], optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.lane = lane
        self.positions = positions
        held = [position for position in positions if lane.rows(position).rows]
        self.start = self.stop = 0
        if held:
            last = lane.rows(held[-1])
            self.start = lane.rows(held[0]).offset
            self.stop = last.offset + last.numel(lane.layout.tensors[held[-1]].granule)
        self.is_every = len(positions) == len(lane.parameters)
        self.is_all = self.stop - self.start == lane.master.numel()  # that this rank has of the lane
        self.parameter = FlatParameter(torch.zeros(1, device=lane.master.device, dtype=lane.store_dtype))
        self.parameter.notes = lane.notes
        if held:
            self.parameter.data = lane.master[self.start : self.stop]
        self.owner: int | None = None  # the rank of `lane.spread` that steps it whole: Note [Owners] in owners.py
        self.handed_out = False
        self.uneven = False  # gradients of some parameters were dropped since `hand_out`
        self.version = self.parameter._version  # as torch counts what is written to it, when a step was last noted
        self.group = group
        self.optimizer = weakref.ref(optimizer)

    @property
    def numel(self) -> int:
        """Count the elements of the tensor that is stepped: one where this rank has no rows."""
        return max(1, self.stop - self.start)

    def newly_stepped(self) -> list[torch.Tensor]:
        """Return the whole parameters if the optimizer wrote to the run since this was asked, or is about to."""
        version = self.parameter._version
        if version == self.version and self.lane.stepping is None:
            return []
        self.version = version
        return [self.lane.leaves[position] for position in self.positions]

    def hand_out(self) -> None:
        """Set the run's gradient from the lane's; split where some parameters have one and others do not."""
        if self.lane.spent_norm is not None:
            return
        self.uneven = False
        valid = self.lane.valid
        if False not in valid:
            self.handed_out = True
        else:
            flags = {valid[position] for position in self.positions}
            if len(flags) > 1:
                self._split()
                return
            self.handed_out = True in flags
        if self.handed_out and GET_GRAD(self.parameter) is None:
            SET_GRAD(self.parameter, self._rows_of(self.lane.gradient))
        elif not self.handed_out:
            self.parameter.grad = None

    def hand_out_all(self) -> None:
        """Set the run's gradient from the lane's, of which all parameters are known to have one."""
        SET_GRAD(self.parameter, self._rows_of(self.lane.gradient))

    def take_back(self) -> None:
        """Let go of a gradient that was stepped."""
        self.parameter.grad = None
        self.handed_out = self.uneven = False

    def _rows_of(self, gradient: torch.Tensor | None) -> torch.Tensor:
        if self.stop == self.start:
            return torch.zeros_like(self.parameter)
        assert gradient is not None
        return gradient if self.is_all else gradient[self.start : self.stop]

    def dropped(self) -> None:
        """Follow `p.grad = None` of one of the parameters.

        Others may follow (`module.zero_grad()` drops all in turn), so the run is split no sooner than at a step.
        """
        valid = self.lane.valid
        if True not in valid or not any(valid[position] for position in self.positions):
            self.parameter.grad = None
            self.handed_out = self.uneven = False
        elif self.handed_out:
            self.uneven = True

    def _split(self) -> None:
        """Replace this run by one run a parameter, in the optimizer and in the lane, with the state cut likewise."""
        optimizer = self.optimizer()
        assert optimizer is not None
        self.lane.await_step()
        self._refuse_to_cut(optimizer)
        parts = [Run(self.lane, [position], optimizer, self.group) for position in self.positions]
        place = _index_of(self.group["params"], self.parameter)
        self.group["params"][place : place + 1] = [part.parameter for part in parts]
        state = optimizer.state.pop(self.parameter, None)
        for part in parts:
            if state:
                optimizer.state[part.parameter] = {k: self._cut(v, part) for k, v in state.items()}
        gradient = self.lane.gradient  # may be kept alive by this run alone
        place = self.lane.runs.index(self)
        self.lane.runs[place : place + 1] = parts
        for part in parts:
            if gradient is not None and self.lane.valid[part.positions[0]]:
                part.parameter.grad = part._rows_of(gradient)
            part.hand_out()

    def _refuse_to_cut(self, optimizer: Optimizer) -> None:
        names = shorten(self.lane.name_of(position) for position in self.positions)
        why = (
            f"{names} were stepped as one tensor and have gradients in different steps now: give each of them one in "
            "every step, or freeze those without before the first"
        )
        for key, value in optimizer.state.get(self.parameter, {}).items():
            refuse_to_cut(optimizer, key, value, self.numel, why=why)

    def _cut(self, value: Any, part: Run) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == self.parameter.shape and value.dim():
            if part.stop == part.start:
                return torch.zeros_like(part.parameter, dtype=value.dtype)  # one element, as the parameter has
            return value[part.start - self.start : part.stop - self.start].clone()
        return value.clone() if isinstance(value, torch.Tensor) else value


def _index_of(params: list[Any], parameter: Any) -> int:
    return next(i for i, p in enumerate(params) if p is parameter)


def keep_runs(lane: Lane, kept: list[Run]) -> None:
    """Let go of all but some runs of a lane, those of an optimizer that was replaced.

    Their views have kept the gradient alive; from now on the lane does, until a new optimizer has views of it.
    """
    if len(kept) < len(lane.runs):
        gradient = lane.gradient
        if gradient is not None and lane.accumulated:
            lane.take_gradient(gradient)
    lane.runs = kept
