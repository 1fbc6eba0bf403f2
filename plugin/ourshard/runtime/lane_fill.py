"""How whole parameters come into a lane: cast from masters, brought up from below, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ourshard.config import Tier
from ourshard.runtime.coded import codes_now, gather_coded
from ourshard.runtime.lane_store import LaneStore
from ourshard.runtime.placement import At
from ourshard.runtime.secondary import keeps_secondary

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane


class LaneFill(LaneStore):
    """The buffers of a lane, and the ways from its master to its whole parameters."""

    def fill(self) -> None:
        """Bring the whole parameters into `full` (on the current stream)."""
        if self.placement.params is At.WHOLE and not self.stale:
            return
        secondary = self.secondary
        if secondary is not None and not keeps_secondary(self.unit.engine):
            secondary = None
        coded = self.codec is not None and codes_now(self.unit.engine)
        if secondary is None or not secondary.shows(coded):
            self._fill_from_masters(coded)
            if secondary is not None:
                secondary.keep(self.full.tensor, coded)
            return
        self.shows_coded = coded
        self.unit.engine.collectives.fill_slot(self.full.tensor, secondary.tensor, secondary.axis, self.unit.label)

    def _fill_from_masters(self, coded: bool) -> None:
        stale, self.stale = self.stale, False
        if self.direct:
            return
        if self.placement.whole:
            self.full.tensor.copy_(self.master)
            return
        source = self._prepare_segment(stale)
        self.shows_coded = coded
        if self.codec is not None and coded:
            if source is not None:
                self.segment.copy_(source, non_blocking=True)
            gather_coded(self.unit.engine, self.codec, self.full.tensor, self.segment, self.unit.label)
            return
        self.unit.engine.collectives.fill_slot(self.full.tensor, self.segment, self.axis, self.unit.label, source)

    def _prepare_segment(self, stale: bool) -> torch.Tensor | None:
        """Return what is to come into this rank's part of `full`, any dtype; None where it is there."""
        if self.stepping is not None:
            self.await_step()
        sent, self.sent = self.sent, False
        if stale and not sent:
            if self.on_disk:
                self.check_disk()
            if self.shard is not None and self._shard_tier is Tier.CPU and not self.divided:
                self._fill_on_the_way_down()
                return None
            if self.placement.params is At.WHOLE and not self.divided:
                return None if self.aliased else self._above(self.master)
            if self.shard is not None or self.placement.params is At.WHOLE:
                self.send_up()
        if stale and self.divided:
            self._join_parts()
        if self.passes_disk:
            self._fetch()
            return None
        if self.shard is not None:
            return self.shard
        return self._above(self._master) if self.placement.params is At.SHARD else None

    def send_up(self, master: torch.Tensor | None = None) -> None:
        """Cast a master that changed into what rests between gathers, if anything does; on the current stream.

        `master`: where its values are now, while it is not in its place.
        """
        master = self.master if master is None else master
        if self.passes_disk and self.shard is not None and not self.divided:
            self._windows.store(cast("Lane", self), master)
        elif self.shard is not None and self._shard_tier is not Tier.NONE:
            self._forget_window()
            self.own_in(self.shard).copy_(self._above(master).to(self.compute_dtype), non_blocking=True)
        elif self.shard is not None:
            self.own_in(self.shard).copy_(self._above(master))
        elif self.placement.params is At.WHOLE and not self.aliased:
            self.own.copy_(self._above(master))

    def _fill_on_the_way_down(self) -> None:
        """Cast a master into the segment, and from there into the shard on the host: `send_up` without a way back."""
        assert self.shard is not None
        self.segment.copy_(self._above(self.master))
        self.shard.copy_(self.segment, non_blocking=True)

    def _join_parts(self) -> None:
        """Fill what rests between gathers with the parts of other replicas; on the current stream."""
        replicate, label = self.unit.engine.mesh.replicate, self.unit.label
        above = self.shard is not None and self._shard_tier is Tier.NONE
        at_rest = self.shard if above and self.shard is not None else self.segment
        if self.passes_disk:
            self._fetch()
        elif self.shard is not None and not above:
            self.own.copy_(self.own_in(self.shard), non_blocking=True)
        self.unit.engine.collectives.all_gather(at_rest, self.own_in(at_rest), replicate, label)
        if self.passes_disk:
            self._windows.store(cast("Lane", self), self.segment)
        elif self.shard is not None and not above:
            self.shard.copy_(self.segment, non_blocking=True)

    def _fetch(self) -> None:
        """Bring what rests on the disk into the segment; on the current stream."""
        here = self._windows.fetch(cast("Lane", self))
        same = here.dtype == self.compute_dtype
        self.segment.copy_(here if same else here.to(self.device, non_blocking=True), non_blocking=True)
        self._windows.done(cast("Lane", self), self.unit.engine.streams.gather.mark(None))

    def _above(self, master: torch.Tensor) -> torch.Tensor:
        """Return a master on the device, which casts it: torch would cast on the host, into memory not pinned."""
        return master.to(self.device, non_blocking=True) if self.offloaded else master

    def gather_master(self) -> torch.Tensor:
        """Return the whole lane in store dtype, exact. Collective where masters are shards."""
        self.check_disk()
        return self.gather_exact(self.master)

    def gather_exact(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the whole lane on the device from every rank's flat tensor in the layout of its master. Collective."""
        if self.placement.whole:
            return rows
        whole = torch.empty(self.layout.numel, dtype=rows.dtype, device=self.device)
        self.own_of(whole).copy_(rows)
        engine, segment = self.unit.engine, self.segment_of(whole)
        if self.divided:
            engine.collectives.all_gather(segment, self.own_in(segment), engine.mesh.replicate, self.unit.label)
        engine.collectives.all_gather(whole, segment, self.axis, self.unit.label)
        return whole
