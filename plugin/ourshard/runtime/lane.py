"""A lane on this rank: how gradients arrive in it, are reduced, and are shown to optimizers and users.

Its buffers are in `lane_store.py`, how they are filled in `lane_fill.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ourshard.runtime.divided import WaitingSum
from ourshard.runtime.handle import GET_GRAD, ShardGradient, gradient_handle
from ourshard.runtime.inventory import Parameter
from ourshard.runtime.lane_direct import dense
from ourshard.runtime.lane_reduced import ReducedGradient
from ourshard.runtime.layout import LaneLayout
from ourshard.runtime.ledger import Kind
from ourshard.runtime.norms import KnownNorms, norms_of
from ourshard.runtime.peer import Reduction
from ourshard.runtime.placement import At
from ourshard.runtime.run import keep_runs

if TYPE_CHECKING:
    from ourshard.runtime.unit import Unit


class Lane(ReducedGradient):
    """One lane of one unit: the buffers, and the gradients that pass through."""

    def __init__(self, unit: Unit, layout: LaneLayout, parameters: list[Parameter], reduce_dtype: torch.dtype) -> None:
        super().__init__(unit, layout, parameters)
        self.reduce_dtype = reduce_dtype
        self.whole_gradients = self.placement.grads is At.WHOLE
        self.arriving: torch.Tensor | None = None
        self.touched = [False] * len(self.parameters)  # this rank's backward gave a gradient, not dropped since
        self.valid = [False] * len(self.parameters)  # some rank's did; known once the ranks have told each other
        self.reduced_version = -1  # of `arriving`, where whole gradients stay in it
        self.fresh = True  # `arriving` holds nothing yet of this sum
        self.is_lent = False  # `arriving` is a piece of the peers' arena
        self.in_pieces = False  # `arriving` goes through the arena in pieces
        self._lent_views = None
        self.spent_norm: torch.Tensor | None = None  # of one that was stepped and let go in backward: see `spent`
        self._arriving_kind = Kind.GRADIENT if self.whole_gradients else Kind.REDUCE
        self._shown: set[int] = set()  # positions whose whole parameter had its gradient set here
        self._dropped: set[int] = set()  # positions whose gradient was dropped, and is still in the sums
        self.waiting = WaitingSum(self) if self.divided else None

    # ---- gradients -----------------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Say whether backward left a gradient that has not been reduced."""
        if self.direct:
            return any(not self.is_reduced(position) for position in range(len(self.leaves)))
        return self.arriving is not None or self.has_leaf_gradients()

    def has_leaf_gradients(self) -> bool:
        """Say whether backward left any that has not been taken in."""
        found = False
        for leaf in self.leaves:  # on the host a generator's turns count
            found |= leaf.grad is not None
        return found

    def has_gradients(self) -> list[bool]:
        """Say which parameters have a gradient from this rank's backwards, not dropped since."""
        if False not in self.touched:
            return self.touched
        return [touched or leaf.grad is not None for touched, leaf in zip(self.touched, self.leaves, strict=True)]

    def prepare(self, reduce_next: bool, again: bool = False) -> None:
        """Take the memory that `take_gradients` and `reduce` fill; on the compute stream, whose allocator owns it.

        `again`: this backward has reduced the lane before, and more came.
        """
        if self.direct:
            self.fresh = not again
            dtype = self.leaves[0].dtype  # the user may have moved them: `model.to(dtype)`
            if self.arriving is None or self.arriving.dtype != dtype:
                self.arriving = torch.zeros(self.layout.numel, dtype=dtype, device=self.device)
                self.hold(Kind.GRADIENT, self.arriving)
            return
        self.forget_released()
        if self.spent_norm is not None and self.unit.engine.in_backward is not None:
            self.unit.engine.in_backward.refuse_late(self.unit)
        if self._dropped:
            self.erase_dropped()
        self.fresh = self.arriving is None
        if self.arriving is None:
            self.arriving = self._make_arriving(reduce_next)
        if reduce_next:
            self._open_sum(self.unit.engine.sync_backward)

    def take_gradients(self) -> list[torch.Tensor]:
        """Move the leaves' gradients into `arriving`, where they add up until the next reduction.

        Gradients that wait for a later backward wait in master dtype, so that adding loses nothing. Returns the
        gradients that were read, for the caller to keep until this stream has passed.
        """
        if self.direct:
            return self.take_direct()
        assert self.arriving is not None
        views, gaps = self._views_of(self.arriving)
        grads: list[Any] = [leaf.grad for leaf in self.leaves]
        missing = is_sparse = False
        for position, grad in enumerate(grads):  # in place: on the host a comprehension's turn counts
            if grad is None:
                missing = True
            else:
                self.touched[position] = True
                self.leaves[position].grad = None
                is_sparse |= grad.is_sparse
        if missing:
            gaps = [*gaps, *(view for view, grad in zip(views, grads, strict=True) if grad is None)]
            views = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if is_sparse:
            grads = [dense(grad) for grad in grads]
        if self.fresh and gaps:
            torch._foreach_zero_(gaps)
        if views:
            (torch._foreach_copy_ if self.fresh else torch._foreach_add_)(views, grads)
        return grads

    def _make_arriving(self, reduce_next: bool) -> torch.Tensor:
        peer, mesh = self.unit.engine.peer, self.unit.engine.mesh
        dtype = self.reduce_dtype if reduce_next else self.store_dtype
        if reduce_next and peer is not None and not self.placement.whole:
            lent = peer.lend(self.layout.numel, self.lent_dtype)
            if lent is not None:
                self.is_lent = True
                self.make_norms()
                return lent
            if self.unit.rooted and mesh.replicate.size == 1 and not self.offloaded:
                self.in_pieces = True
                self.make_norms()
                dtype = self.lent_dtype
        if reduce_next:
            buffer = self.unit.engine.in_flight.take(self.layout.numel, dtype, self.device)
        else:
            buffer = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
        if self.unit.engine.ledger is not None:
            self.hold(self._arriving_kind, buffer)
        return buffer

    def reduce(self, sync: bool) -> list[torch.Tensor]:
        """Reduce `arriving` over the mesh into `gradient`, on the current stream.

        Over the shard axis always, over `replicate` when `sync`. Returns the buffers that the reduction read and
        that no later one may use, for the caller to keep until the stream has passed.
        """
        assert self.arriving is not None
        if self.in_pieces:
            return self._reduce_in_pieces()
        engine = self.unit.engine
        buffer = self.arriving
        if buffer.dtype != self.reduce_dtype:
            buffer = buffer.to(self.reduce_dtype)
        if self.direct:
            engine.reducer.reduce(buffer, engine.mesh.world, self.unit.label)
            if buffer is not self.arriving:
                self.arriving.copy_(buffer)
            self.reduced_version = self.arriving._version
            return [buffer]
        if engine.ledger is not None:
            self.hold(self._arriving_kind, self.arriving, -1)
        zeroed = self._pattern if self.coder is None else None
        read = [] if engine.in_flight.give_back(self.arriving, zeroed) else [self.arriving]
        read += [] if buffer is self.arriving else [buffer]
        self.arriving = None
        if self.placement.whole:
            engine.reducer.reduce(buffer, engine.mesh.world, self.unit.label)
            self._accumulate(buffer, sync=False)
            return read
        if self._lands_in_gradient(buffer.dtype, sync):
            assert self._gradient is not None
            engine.reducer.scatter(self._gradient, buffer, self.axis, self.unit.label)
            self.accumulated = True
            return read
        segment = self.segment_of(buffer)
        if self.coder is not None:
            self.coder.scatter(segment, buffer)
        else:
            engine.reducer.scatter(segment, buffer, self.axis, self.unit.label)
        return read + self._accumulate(segment, sync)

    def _lands_in_gradient(self, dtype: torch.dtype, sync: bool) -> bool:
        """Say whether what comes over the shard axis is `gradient` as it is: nothing is added, cast or sent on."""
        if self.coder is not None or self.divided or self.store_dtype != dtype or self._travels_on(sync):
            return False
        return self.axis.size > 1 and not self.accumulated  # since `prepare`, which has made it

    def _reduce_in_pieces(self) -> list[torch.Tensor]:
        assert self.arriving is not None
        whole, self.arriving, self.in_pieces = self.arriving, None, False
        self.hold(self._arriving_kind, whole, -1)
        gradient, first = self._open_gradient()
        self.unit.engine.collectives.peer_reduce_in_pieces(
            Reduction(whole, gradient, self._norms_of_blocks, add=not first)
        )
        self.notes.norms = KnownNorms(self._norms_of_blocks, gradient)
        self.unit.engine.in_flight.give_back(whole)
        self.accumulated = True
        return []

    def lent_reduction(self, sync: bool) -> Reduction:
        """Describe the reduction of `arriving` in the arena; `end_loan` must follow it."""
        assert self.arriving is not None
        if self._travels_on(sync):
            return Reduction(self.arriving, self.segment_of(self.arriving), self._norms_of_blocks, add=False)
        total, first = self._open_sum(sync)
        if self.waiting is not None:
            self.waiting.holds = True
        else:
            self.accumulated = True
        return Reduction(self.arriving, total, self._norms_of_blocks, add=not first)

    def end_loan(self, sync: bool) -> list[torch.Tensor]:
        """Give the arena back, after the reduction that `lent_reduction` described; return what else was read."""
        assert self.arriving is not None
        read: list[torch.Tensor] = []
        if self._travels_on(sync):
            read = self._accumulate(self.segment_of(self.arriving), sync)
        elif self.waiting is None:
            assert self._gradient is not None
            self.notes.norms = KnownNorms(self._norms_of_blocks, self._gradient)
        self.arriving = None
        self.is_lent = False
        return read

    def _open_sum(self, sync: bool) -> tuple[torch.Tensor, bool]:
        """Return where the next reduction over the shard axis adds up, held, and whether nothing is there yet."""
        if self.waiting is not None and not sync:
            return self.waiting.open(), not self.waiting.holds
        return self._open_gradient()

    def _accumulate(self, segment: torch.Tensor, sync: bool) -> list[torch.Tensor]:
        """Add a reduced segment to `gradient`; when `sync`, reduce that over `replicate`.

        Divided masters get their part of it, when `sync`. Returns the buffers that were read.
        """
        engine, read = self.unit.engine, []
        if self.waiting is not None:
            if not sync:
                self.waiting.add(segment)
                return []
            read = self.waiting.give_to(segment)
            own = self.own_in(segment)
            if self.coder is not None:
                self.coder.reduce_part(own, segment)
            else:
                engine.reducer.scatter(own, segment, engine.mesh.replicate, self.unit.label)
            segment, sync = own, False
        gradient, first = self._open_gradient()
        replicated = sync and engine.mesh.replicate.size > 1
        if replicated and first:
            self._reduce_over_replicas(segment)
        total = segment
        if first:
            gradient.copy_(segment, non_blocking=True)
        elif self.offloaded:
            total = gradient.to(self.device, non_blocking=True).add_(segment)
            gradient.copy_(total, non_blocking=True)
        else:
            gradient.add_(segment)
        if replicated and not first:
            segment.copy_(gradient, non_blocking=True)
            self._reduce_over_replicas(segment)
            gradient.copy_(segment, non_blocking=True)
            total = segment
        if self.offloaded:
            self.notes.norms = KnownNorms(norms_of([total.to(gradient.dtype)])[0], gradient)
        self.accumulated = True
        return read

    def _reduce_over_replicas(self, segment: torch.Tensor) -> None:
        if self.coder is not None:
            self.coder.reduce_replicas(segment)
            return
        self.unit.engine.reducer.reduce(segment, self.unit.engine.mesh.replicate, self.unit.label)

    def settle(self, flags: list[bool]) -> None:
        """Take in which parameters have a gradient on any rank, and show gradients where the user looks for them."""
        self.valid = flags
        if self.placement.whole:
            buffer = self.arriving if self.direct else self.gradient
            if buffer is not None:
                self._show(self._views_kept(buffer), flags)
        for run in tuple(self.runs):
            if run.optimizer() is None:
                keep_runs(self, [other for other in self.runs if other is not run])
            else:
                run.hand_out()
        if not self.placement.whole and not self.offloaded and self._all_handed_out():
            self._gradient = None

    def show_waiting(self) -> None:
        """Show whole gradients that wait for a sync, as DDP does; where a sum is shown already, it stays."""
        if self.placement.whole and not self.direct and not self.accumulated and self.arriving is not None:
            self._show(self._pattern.views_of(self.arriving).parameters, self.touched)

    def _show(self, views: Sequence[torch.Tensor], flags: Sequence[bool]) -> None:
        """Let the user's whole parameters have views as gradients, where flagged; direct lanes have them in place."""
        for position, flag in enumerate(flags):
            if flag and (not self.direct or self.resting[position].grad is None):
                self.resting[position].grad = views[position]
        self._shown.update(itertools.compress(range(len(flags)), flags))

    def _all_handed_out(self) -> bool:
        """Say whether optimizers hold all that `gradient` has."""
        for run in self.runs:
            if run.is_every and run.handed_out:
                return True
        return self._none_but([position for run in self.runs if run.handed_out for position in run.positions])

    def _none_but(self, positions: Collection[int]) -> bool:
        """Say whether no others have a gradient."""
        held = set(positions)
        return all(position in held for position, valid in enumerate(self.valid) if valid)

    def forget_released(self) -> None:
        """Notice gradients that `zero_grad(set_to_none=True)` of an optimizer, or of a plain parameter, dropped."""
        gone = {position for position in self._shown if self.resting[position].grad is None} if self._shown else set()
        for run in self.runs:
            if run.handed_out and GET_GRAD(run.parameter) is None:
                gone.update(run.positions)
        if gone:
            self.drop_gradients(gone)

    @property
    def spent(self) -> bool:
        """Say whether the gradient was stepped and let go in backward, and not dropped by the user since."""
        return self.spent_norm is not None

    def let_go_of_gradient(self, norm: torch.Tensor) -> None:
        """Free the gradient, which was stepped, and keep its norm: Note [Steps in backward] in in_backward.py."""
        self.spent_norm = norm
        self.accumulated = False
        for run in self.runs:
            run.take_back()
        self._gradient = None
        self._hold_gradient(0)

    def drop_gradients(self, positions: Collection[int]) -> None:
        """Forget the gradients of some parameters, as `p.grad = None` does, also where only other ranks had one."""
        if self.spent_norm is not None and self.unit.engine.in_backward is not None:
            self.unit.engine.in_backward.check_drop(self)
        count = len(self.parameters)
        every = len(positions) == count
        for position in positions:
            self.valid[position] = self.touched[position] = False
        if self._shown:
            self._shown.difference_update(positions)
        if self.direct:
            return
        if not every:
            self._dropped.update(positions)
            every = len(self._dropped) == count
        if every:
            self._forget_all()
        for run in self.runs:
            if every or any(position in positions for position in run.positions):
                run.dropped()

    def erase_dropped(self) -> None:
        """Zero what was dropped of sums that go on. Late, since `zero_grad` mostly drops all, one after the other."""
        for position in self._dropped:
            self.zero_gradient(position)
        self._dropped.clear()

    def _forget_all(self) -> None:
        self.accumulated, self.spent_norm, self.notes.divisor = False, None, None
        self._dropped = set()
        if not self.placement.whole:
            self._gradient = None
            self._hold_gradient(0)
        if self.waiting is not None:
            self.waiting.forget()
        if self.arriving is not None:
            self.hold(self._arriving_kind, self.arriving, -1)
            self.arriving = None
            self.in_pieces = False

    def zero_gradient(self, position: int) -> None:
        """Set the gradient of one parameter to zero, and padding beside it, which has the NaN that was clipped by."""
        self._refuse_spent(position)
        if self.gradient is not None:
            self.gradient[self.span(position)].zero_()
        if self.arriving is not None:
            self.whole_view(self.arriving, position).zero_()
        if self.waiting is not None:
            self.waiting.zero(position)

    def local_gradient_rows(self, position: int) -> torch.Tensor:
        """Return this rank's rows of a reduced gradient, a view. Raises `RuntimeError` before it is reduced."""
        self._refuse_spent(position)
        self.notes.is_seen()
        if not self.rows(position).rows:
            return self.rows_view(self.master, position)  # no element, of the right shape
        if self.gradient is None:
            raise RuntimeError(
                f"The gradient of {self.name_of(position)!r} has not been reduced yet: this backward did not sync "
                "(accumulation with deferred reduction)."
            )
        return self.rows_view(self.gradient, position)

    def _refuse_spent(self, position: int) -> None:
        if self.spent:
            raise RuntimeError(
                f"The gradient of {self.name_of(position)!r} is gone: with optimizer_in_backward it was let go as it "
                "was stepped. To look at gradients, change or keep them (zero_grad(set_to_none=False)), leave it out."
            )

    def gradient_handle(self, position: int) -> ShardGradient | None:
        """Return what `p.grad` shows: a handle if the parameter has a gradient, else None."""
        self.forget_released()
        if not self.valid[position] and not self.touched[position]:
            return None
        return gradient_handle(self, position, self.parameters[position].shape, self.store_dtype)
