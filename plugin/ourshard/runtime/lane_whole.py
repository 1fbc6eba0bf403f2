"""The whole gradients that a lane collects: views of their buffer, and how they leave it."""

from __future__ import annotations

import functools

import torch

from ourshard.runtime.lane_store import LaneStore
from ourshard.runtime.lane_views import Pattern, Views, pattern_of


class WholeGradients(LaneStore):
    """How a lane cuts a buffer of whole gradients into those of its parameters, and in which dtype they travel."""

    is_lent: bool
    reduce_dtype: torch.dtype
    _kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # whole gradients that stay, and views of them
    _lent_views: tuple[tuple[int, torch.dtype], Views] | None

    def _views_of(self, buffer: torch.Tensor) -> Views:
        """Return views of `arriving`; made once for one that comes back."""
        if not self.is_lent:
            return self.unit.engine.in_flight.views_of(buffer, self._pattern)
        where = (buffer.data_ptr(), buffer.dtype)
        if self._lent_views is None or self._lent_views[0] != where:
            self._lent_views = (where, self._pattern.views_of(buffer))
        return self._lent_views[1]

    def _views_kept(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the parameters in a buffer that stays from step to step; made once."""
        if self._kept is None or self._kept[0] is not buffer:
            self._kept = buffer, self._pattern.views_of(buffer).parameters
        return self._kept[1]

    @functools.cached_property
    def _pattern(self) -> Pattern:
        pairs = zip(self.layout.tensors, self.parameters, strict=True)
        return pattern_of(self.layout.numel, tuple((t.offset, t.numel, tuple(p.shape)) for t, p in pairs))

    @property
    def lent_dtype(self) -> torch.dtype:
        """Return the dtype of gradients in the arena.

        They have the precision of the compute dtype, and the peers' kernel adds in fp32, so moving them in the compute
        dtype loses nothing, even where `reduce_dtype` is wider.
        """
        narrower = self.compute_dtype.itemsize < self.reduce_dtype.itemsize
        again = self._travels_on(sync=True)
        return self.compute_dtype if narrower and not again else self.reduce_dtype

    def _travels_on(self, sync: bool) -> bool:
        """Say whether the mean over the shard axis goes on from there: over `replicate`, or to the host."""
        return self.offloaded or (sync and self.unit.engine.mesh.replicate.size > 1)
