"""Clipping of gradients on the host that waits for the step.

Note [Late division]
--------------------
A pass over gradients on the host moves 8 bytes an element, where AdamW moves 28. `clip_grad_norm_` therefore only notes
by what the gradient of an offloaded lane is to be divided. torch's fused Adam divides as it reads the gradient, for
which it has `grad_scale`; other optimizers find it divided right before their step of the lane. On the device the same
division is done at once, so that the bits are the same.

Whoever reads or changes the gradient through the engine (`parameter.grad` of the model, another clipping, a backward
that adds to it, a loss scaler) finds it divided, since `Lane.gradient` does what waits. Hooks of the optimizer do, too.
Left are the flat tensors in the groups of the optimizer itself: between clipping and the step they have gradients as
they came, and one that was written to in this time ends the step with an error, as nobody can tell what was meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane


class LateDivision:
    """What the gradient of one lane is still to be divided by: Note [Late division]."""

    __slots__ = ("_lane", "_version", "divisor")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._version = 0  # of the gradient when it was asked for
        self.divisor: torch.Tensor | None = None  # a scalar on the host

    def ask(self, gradient: torch.Tensor, divisor: torch.Tensor) -> bool:
        """Note that `gradient` is to be divided; False where it is not one optimizer that steps all of it."""
        lane = self._lane
        if not lane.offloaded:
            return False
        stepped = {position for run in lane.runs for position in run.positions}
        whole = all(position in stepped for position, valid in enumerate(lane.valid) if valid)
        if not whole or len({id(run.optimizer()) for run in lane.runs}) != 1:
            return False
        self.divisor, self._version = divisor, gradient._version
        return True

    def apply(self, gradient: torch.Tensor) -> None:
        """Divide now what waits."""
        divisor = self.take(gradient)
        if divisor is not None:
            gradient.div_(divisor)

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the divisor to whoever divides by it now. Raises `RuntimeError` if someone wrote to the gradient."""
        divisor, self.divisor = self.divisor, None
        if divisor is not None and gradient._version != self._version:
            raise RuntimeError(
                f"The flat gradient of {self._lane.name_of(0)!r} in the optimizer's groups was changed between "
                "clipping and the step, where its clipping still waits for the step (offload). Change gradients before "
                "clipping, or through `parameter.grad` of the model, or in a hook of the optimizer."
            )
        return divisor

    def forget(self) -> None:
        """Note that the gradient was dropped."""
        self.divisor = None
