"""What users do to a model that is sharded: another dtype, other parameters that train, whole parameters that move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch

from ourshard.runtime.frozen import forget
from ourshard.runtime.lane_fill import LaneFill
from ourshard.runtime.lane_key import master_dtype_of
from ourshard.runtime.lane_store import Left, uses_of
from ourshard.runtime.ledger import Kind
from ourshard.runtime.placement import At

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane


class LaneChanges(LaneFill):
    """The buffers of a lane, as they follow the user."""

    def recast(self, dtype: torch.dtype) -> None:
        """Compute in another dtype from now on, as `model.to(dtype)` asks. Masters keep theirs."""
        if dtype == self.compute_dtype:
            return
        if self.aliased:
            self.master = self.master.clone()
            self.aliased = False
            self.hold(Kind.MASTER, self.master)
        self.full.free()
        self.left.clear()
        self.compute_dtype = dtype
        self._make_full()
        for position, leaf in enumerate(self.leaves):
            leaf.grad = None
            leaf.data = self.whole_view(self.full.tensor, position)
        if self.secondary is not None:
            self.secondary.let_go()
            self._make_secondary()
        self.mark_stale()
        if self._has_shard:
            if self.shard is not None and not self.passes_disk:  # the file keeps what was taken of it
                self.hold(self._shard_kind, self.shard, -1)
            self._make_shard()
        if self.placement.params is At.SHARD:
            self.full.count_own()
            self.full.free()
        self.watch_strays()

    def leave_full(self, saved: Mapping[int, int]) -> None:
        """Take a new slot, and leave the old one's memory to views of it: Note [Kept after gathered] in kept.py.

        Leaves at the positions `saved` are on the old memory, too, while the unit is at rest, until a leaf has no more
        than that many uses.
        """
        old = self.full
        self._make_full()
        for position, leaf in enumerate(self.leaves):
            if position in saved:
                uses = min(saved[position], self.left[position].uses) if position in self.left else saved[position]
                self.left[position] = Left(leaf.data, uses)
            views = [name for name, value in vars(leaf).items() if torch.is_tensor(value) and old.contains(value)]
            leaf.data = self.whole_view(self.full.tensor, position)
            for name in views:
                setattr(leaf, name, leaf.data)
        old.leave()
        self.full.count_own()

    def come_back(self) -> None:
        """Let leaves that are on memory that was left show the whole parameters, and forget those no graph reads."""
        for position, left in list(self.left.items()):
            leaf = self.leaves[position]
            leaf.data = self.whole_view(self.full.tensor, position)
            if uses_of(leaf) <= left.uses:
                del self.left[position]

    def rest_on_left(self) -> None:
        """Let leaves that graphs have saved show the memory that was left to these."""
        for position, left in self.left.items():
            self.leaves[position].data = left.values

    def was_toggled(self) -> bool:
        """Say whether the user toggled `requires_grad` since the leaves followed."""
        if self.direct:
            return not self.trainable and any(p.requires_grad for p in self.leaves)
        for resting, leaf in zip(self.resting, self.leaves, strict=True):  # on the host a generator's turns count
            if resting.requires_grad != leaf.requires_grad:
                return True
        return False

    def follow_requires_grad(self, master_dtype: torch.dtype) -> bool:
        """Take over a `requires_grad` that the user toggled; return whether the lane became trainable."""
        for resting, leaf in zip(self.resting, self.leaves, strict=True):
            if leaf.requires_grad != resting.requires_grad:
                leaf.requires_grad_(resting.requires_grad)
        self.watch_strays()
        if self.trainable or not any(leaf.requires_grad for leaf in self.leaves):
            return False
        self.trainable = True
        forget(self.unit.engine, (parameter.name for parameter in self.parameters))
        if self.on_disk:
            self._leave_disk()
        wanted = master_dtype_of(self.store_dtype, master_dtype)
        if wanted != self.store_dtype:
            self._widen(wanted)
        return True

    def _leave_disk(self) -> None:
        """Bring the stored shard of a lane that is trained from now on into host memory."""
        self.check_disk()
        self._forget_window()
        self.master = self.take_host(self.layout.shard_numel).copy_(self.master)
        self.on_disk = self.passes_disk = False

    def _widen(self, dtype: torch.dtype) -> None:
        """Keep masters in another dtype from now on; a direct lane becomes one with masters beside the leaves."""
        kind = Kind.HOST if self.offloaded else Kind.MASTER
        if not self.aliased:
            self.hold(kind, self.master, -1)
        self.store_dtype = dtype
        self.master = self.master.to(dtype)
        self.hold(kind, self.master)
        self.aliased = False
        if self.direct:
            self.direct = False
            self.full.relabel(Kind.FULL)
            views = [self.whole_view(self.full.tensor, position) for position in range(len(self.parameters))]
            self.leaves = [self._make_leaf(tensor, view) for tensor, view in zip(self.resting, views, strict=True)]
            self._note_leaves()
            self.unit.add_sites(cast("Lane", self))
        if self.placement.whole:
            self._point_to_masters()
        self.watch_strays()

    def follow_moved(self) -> None:
        """Take over whole parameters that the user moved to another dtype or memory, as `model.to(dtype)` does."""
        start, width = self.master.data_ptr(), self.store_dtype.itemsize
        pairs = zip(self.resting, self.layout.tensors, strict=True)
        moved = [p for p, tensor in pairs if tensor.numel and p.data_ptr() != start + tensor.offset * width]
        if not moved:
            return
        views = [self.whole_view(self.master, position) for position in range(len(self.parameters))]
        for parameter, view in zip(self.resting, views, strict=True):
            changed = parameter.data != view.to(parameter.dtype)  # else the master has more precision
            view.copy_(torch.where(changed, parameter.data.to(view.dtype), view))
        self._point_to_masters()
        self.watch_strays()
        if moved[0].dtype != self.store_dtype:
            self.recast(moved[0].dtype)
