"""The gradients of a direct lane: plain gradients of plain parameters, which add up where they are reduced."""

from __future__ import annotations

import torch

from ourshard.runtime.lane_changes import LaneChanges


class DirectGradients(LaneChanges):
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
        if grad.is_sparse:
            return False
        return grad.data_ptr() == self.arriving.data_ptr() + self.layout.tensors[position].offset * grad.element_size()

    def take_direct(self) -> list[torch.Tensor]:
        """Make each `p.grad` a view of `arriving`, so that backward adds into it; return the tensors it replaces."""
        assert self.arriving is not None
        replaced = []
        for position, leaf in enumerate(self.leaves):
            view = self.whole_view(self.arriving, position)
            self.touched[position] = leaf.grad is not None
            if leaf.grad is None:
                if self.fresh:  # else it has what other ranks gave
                    view.zero_()
            elif not self._is_in_place(position):
                grad = dense(leaf.grad)
                view.copy_(grad)
                replaced.append(grad)
                leaf.grad = view
        return replaced

    def show_direct(self) -> None:
        """Let the leaves have their gradients in `arriving`, which a replayed backward has filled."""
        assert self.arriving is not None
        for position, leaf in enumerate(self.leaves):
            if self.touched[position]:
                leaf.grad = self.whole_view(self.arriving, position)
        self.reduced_version = self.arriving._version


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as collectives add it: those of `Embedding(sparse=True)` come as rows and their indices."""
    return gradient.to_dense() if gradient.is_sparse else gradient
