"""Clipping of gradients that waits for the step.

Note [Late division]
--------------------
A pass over gradients moves 8 bytes an element, where AdamW moves 28. `clip_grad_norm_` therefore only notes by what the
gradient of a lane is to be divided, where torch's fused Adam steps all of it: it divides as it reads the gradient, for
which it has `grad_scale`, with the same bits in float32, and writes it back. On the host others find it divided right
before their step of the lane, which brings it into the caches.

Whoever reads or changes the gradient (`parameter.grad` of the model, or of the optimizer's own tensors, another
clipping, a backward that adds to it, a loss scaler, a hook of the optimizer) finds it divided, since `Lane.gradient`
and `FlatParameter.grad` do what waits. Left are tensors that were taken before clipping: they show gradients as they
were, and one that was written to after it ends the step with an error, as nobody can tell what was meant.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ourshard.runtime.fused import divides_as_it_steps
from ourshard.runtime.norms import KnownNorms

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane


class GradientNotes:
    """What the gradient of one lane is still to be divided by, and what is known of it, until someone looks at it."""

    __slots__ = ("_lane", "_version", "divisor", "norms")

    def __init__(self, lane: Lane) -> None:
        self._lane = weakref.ref(lane)  # flat parameters, which optimizers keep alive, have the notes
        self._version = 0  # of the gradient when it was asked to be divided
        self.divisor: torch.Tensor | None = None  # a scalar where the gradient is: Note [Late division]
        self.norms: KnownNorms | None = None  # Note [Known norms] in norms.py

    def is_seen(self) -> None:
        """Note that someone is about to read the gradient, and may write to it."""
        self.norms = None
        lane = self._lane()
        if self.divisor is not None and lane is not None:
            lane.divide_now()

    def ask(self, gradient: torch.Tensor, divisor: torch.Tensor) -> bool:
        """Note that `gradient` is to be divided; False where it is not one optimizer that steps all of it so."""
        lane = self._lane()
        assert lane is not None
        if not lane.offloaded:
            kernels = all(divides_as_it_steps(run.optimizer(), run.group) for run in lane.runs)
            if not kernels or gradient.dtype != torch.float32:
                return False
        if not (len(lane.runs) == 1 and lane.runs[0].is_every):
            stepped = {position for run in lane.runs for position in run.positions}
            whole = all(position in stepped for position, valid in enumerate(lane.valid) if valid)
            if not whole or len({id(run.optimizer()) for run in lane.runs}) != 1:
                return False
        self.divisor, self._version = divisor, gradient._version
        return True

    def apply(self, gradient: torch.Tensor | None) -> None:
        """Divide now what waits."""
        divisor = self.take(gradient)
        if gradient is not None and divisor is not None:
            gradient.div_(divisor)

    def take(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the divisor to whoever divides by it now; None of a gradient that was dropped.

        Raises `RuntimeError` if someone wrote to the gradient.
        """
        divisor, self.divisor = self.divisor, None
        if gradient is None or divisor is None:
            return None
        self.norms = None
        if gradient._version != self._version:
            lane = self._lane()
            assert lane is not None
            raise RuntimeError(
                f"The gradient of {lane.name_of(0)!r} was changed between clipping and the step, through a "
                "tensor that was taken before clipping, which still waits for the step. Change gradients before "
                "clipping, or ask for `grad` again: of the model's parameters, or of those in the optimizer's groups."
            )
        return divisor

    def forget(self) -> None:
        """Note that the gradient was dropped."""
        self.divisor = None
