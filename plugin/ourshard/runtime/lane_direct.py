"""The gradients of a direct lane: plain gradients of plain parameters, which add up where they are reduced."""

from __future__ import annotations

import torch

from ourshard.runtime.lane_changes import LaneChanges
from ourshard.runtime.lane_whole import WholeGradients


class DirectGradients(WholeGradients, LaneChanges):
    """What a lane does where the parameters that the user holds are the masters and the leaves at once."""

    arriving: torch.Tensor | None
    touched: list[bool]
    fresh: bool
    reduced_version: int

    def is_reduced(self, position: int) -> bool:
        """Say whether the gradient of a direct leaf is what the last reduction left: nothing was added since."""
        grad = self.leaves[position].grad
        if grad is None:
            return True
        return self.arriving is not None and self._is_in_place(position) and grad._version == self.reduced_version

    def _is_in_place(self, position: int) -> bool:
        """Say whether the gradient of a direct leaf is a view of `arriving`."""
        grad = self.leaves[position].grad
        assert grad is not None
        assert self.arriving is not None
        if grad is self._views_kept(self.arriving)[position]:
            return True
        if grad.is_sparse:
            return False
        return grad.data_ptr() == self.arriving.data_ptr() + self.layout.tensors[position].offset * grad.element_size()

    def take_direct(self) -> list[torch.Tensor]:
        """Move the gradients into `arriving`, and off the leaves until `settle`; return the tensors that were read.

        What backward brings from now on is no part of what is being reduced. It adds up with that in the next
        reduction, which `again` of `prepare` is about: there this rank has zeros where others gave what it keeps.
        """
        assert self.arriving is not None
        views = self._views_kept(self.arriving)
        absent: list[torch.Tensor] = []
        moved: dict[int, torch.Tensor] = {}  # gradients by position
        for position, leaf in enumerate(self.leaves):
            gradient = leaf.grad
            self.touched[position] = gradient is not None or (self.touched[position] and not self.fresh)
            if gradient is None:
                absent.append(views[position])
            elif not self._is_in_place(position):
                moved[position] = dense(gradient)
            leaf.grad = None
        if absent and self.fresh:
            torch._foreach_zero_(absent)
        if moved:
            into = [views[position] for position in moved]
            (torch._foreach_copy_ if self.fresh else torch._foreach_add_)(into, list(moved.values()))
        return list(moved.values())

    def show_direct(self) -> None:
        """Let the leaves have their gradients in `arriving`, which a replayed backward has filled."""
        assert self.arriving is not None
        for position, leaf in enumerate(self.leaves):
            if self.touched[position]:
                leaf.grad = self._views_kept(self.arriving)[position]
        self.reduced_version = self.arriving._version


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as collectives add it: those of `Embedding(sparse=True)` come as rows and their indices."""
    return gradient.to_dense() if gradient.is_sparse else gradient
