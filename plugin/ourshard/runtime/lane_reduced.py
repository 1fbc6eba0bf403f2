"""The reduced gradient of a lane: where it is, what is known of it, and what waits until it is stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ourshard.runtime.gradient_notes import GradientNotes
from ourshard.runtime.handle import GET_GRAD
from ourshard.runtime.lane_direct import DirectGradients
from ourshard.runtime.ledger import Kind
from ourshard.runtime.peer import BLOCK

if TYPE_CHECKING:
    from ourshard.runtime.inventory import Parameter
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.layout import LaneLayout
    from ourshard.runtime.run import Run
    from ourshard.runtime.unit import Unit


class ReducedGradient(DirectGradients):
    """The buffers of a lane, and the flat gradient that reductions add up in."""

    def __init__(self, unit: Unit, layout: LaneLayout, parameters: list[Parameter]) -> None:
        super().__init__(unit, layout, parameters)
        self._gradient: torch.Tensor | None = None  # see `gradient`
        self._gradient_nbytes = 0  # as the ledger has them
        self._host_gradient: torch.Tensor | None = None  # taken once, where masters are on the host
        self.accumulated = False  # `gradient` holds a sum; else the next reduction overwrites it
        self.notes = GradientNotes(cast("Lane", self))
        self._norms_of_blocks = torch.empty(0, device=self.device)  # what peers' reductions leave; taken once
        self.runs: list[Run] = []  # what optimizers step of this lane; set when one adopts it

    @property
    def gradient(self) -> torch.Tensor | None:
        """Return the flat reduced gradient.

        Once handed out it is kept alive by the optimizer's gradients alone, which are views of it, so that `zero_grad`
        frees it.
        """
        if self.stepping is not None:
            self.await_step()
        if self.notes.divisor is not None:
            self.divide_now()
        return self._as_it_is()

    def _as_it_is(self) -> torch.Tensor | None:
        """Return the gradient, also while a division waits."""
        if self._gradient is None:
            for run in self.runs:
                view = GET_GRAD(run.parameter)
                if run.handed_out and view is not None and run.stop > run.start:
                    return self._around(view, run)
        return self._gradient

    def _around(self, view: torch.Tensor, run: Run) -> torch.Tensor:
        """Return the flat gradient that `view`, which an optimizer has, is a part of."""
        if run.is_all and view.is_contiguous():
            return view
        base = view._base
        if base is not None and base.shape == self.master.shape and base.is_contiguous():
            return base  # what the run's rows were cut from
        storage = view.untyped_storage()
        if view.storage_offset() != run.start or storage.nbytes() != self.master.numel() * view.element_size():
            raise RuntimeError(
                f"The gradient of {self.name_of(run.positions[0])!r} was replaced by another tensor; change sharded "
                "gradients in place, or set them to None."
            )
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, (self.master.numel(),), (1,))

    def divide_now(self) -> None:
        """Do what waits for the step: Note [Late division] in gradient_notes.py."""
        self.notes.apply(self._as_it_is())

    def take_divisor(self) -> torch.Tensor | None:
        """Return what the step is to divide `gradient` by, if anything: Note [Late division] in gradient_notes.py."""
        return self.notes.take(self._as_it_is())

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Take a flat reduced gradient, which a replayed backward has filled, for the lane's own."""
        self._gradient = gradient
        self.notes.norms = None
        self.accumulated = True
        self._hold_gradient(gradient.nbytes)

    def norms_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return norms whose norm is that of `gradient`, where they are known: Note [Known norms] in norms.py."""
        known = self.notes.norms
        return known.norms if known is not None and known.are_of(gradient) else None

    def make_norms(self) -> None:
        """Take the memory for what a reduction by peers leaves, on the compute stream; once."""
        if not self._norms_of_blocks.numel():
            count = -(-self.layout.numel // self.axis.size // BLOCK)
            self._norms_of_blocks = torch.empty(count, device=self.device)
            self.hold(Kind.REDUCE, self._norms_of_blocks)

    def _open_gradient(self) -> tuple[torch.Tensor, bool]:
        """Return `gradient`, held, and whether nothing has been accumulated in it; the caller writes to it."""
        gradient = self.gradient
        if gradient is None:
            gradient = self._make_gradient()
            self.accumulated = False
        self._gradient = gradient
        self.notes.norms = None
        return gradient, not self.accumulated

    def _make_gradient(self) -> torch.Tensor:
        if self.offloaded:
            if self._host_gradient is None:
                self._host_gradient = self.take_host(self.master.numel())
            return self._host_gradient
        gradient = torch.empty_like(self.master)
        self._hold_gradient(gradient.nbytes)
        return gradient

    def _hold_gradient(self, nbytes: int) -> None:
        """Tell the ledger the bytes of `gradient`; 0 once `zero_grad` is known to have freed it."""
        if self.unit.engine.ledger is not None:
            self.unit.engine.ledger.hold(Kind.GRADIENT, nbytes - self._gradient_nbytes)
            self._gradient_nbytes = nbytes
