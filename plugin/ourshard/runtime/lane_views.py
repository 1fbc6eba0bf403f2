"""The whole parameters of a lane as views of one flat buffer, made in one call."""

from __future__ import annotations

import functools

import torch

from ourshard.runtime.lane_store import LaneStore


class WholeViews(LaneStore):
    """How a lane cuts a buffer of whole gradients into those of its parameters."""

    is_lent: bool
    _lent_views: tuple[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] | None

    def _whole_views(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return `whole_view` of every parameter, and what is between; made once for a buffer that comes back."""
        where = (buffer.data_ptr(), buffer.dtype)
        if self._lent_views is not None and self._lent_views[0] == where:
            return self._lent_views[1]
        like, places = self._pattern
        pieces = torch._C._nn.unflatten_dense_tensors(buffer, like)
        views = [pieces[place] for place in places]
        for position in self._empty:
            views[position] = self.whole_view(buffer, position)  # its shape would be lost
        found = views, [pieces[place] for place in self._gaps]
        if self.is_lent:
            self._lent_views = (where, found)
        return found

    @functools.cached_property
    def _pattern(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return a meta tensor for each parameter and each gap, in the order of offsets, and the parameters' places.

        By it one call makes all views of a buffer; on the host that is a third of one slice and view a parameter.
        """
        like: list[torch.Tensor] = []
        places = []
        end = 0
        for parameter, tensor in zip(self.parameters, self.layout.tensors, strict=True):
            if tensor.offset > end:
                like.append(torch.empty(tensor.offset - end, device="meta"))
            places.append(len(like))
            like.append(torch.empty(parameter.shape, device="meta"))
            end = tensor.stop
        if self.layout.numel > end:
            like.append(torch.empty(self.layout.numel - end, device="meta"))
        return like, places

    @functools.cached_property
    def _gaps(self) -> list[int]:
        """Return the places of gaps in `_pattern`."""
        like, places = self._pattern
        return sorted(set(range(len(like))) - set(places))

    @functools.cached_property
    def _empty(self) -> list[int]:
        """Return the positions of parameters without elements."""
        return [position for position, tensor in enumerate(self.layout.tensors) if not tensor.numel]
