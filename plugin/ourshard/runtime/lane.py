"""A lane on this rank: its buffers, the parameters that live in it, and the gradients that pass through it.

Note [Buffers of a lane]
------------------------
full      whole parameters in compute dtype; leaves are views of it. Empty at rest where parameters are sharded.
master    what the optimizer updates: this rank's shard, or the whole lane where masters are whole. For a frozen lane
          it is the stored shard, in the dtype it was loaded in. Where the dtypes agree and parameters are whole, it is
          a part of `full`, not a copy.
arriving  whole gradients in reduce dtype: filled by backward, reduced, then empty (or kept, where gradients are whole
          at rest or a sync is deferred).
gradient  reduced gradients in master dtype, accumulated over micro-batches: the shard, or the whole lane.

A lane is `direct` when the parameters that the user holds are the masters and the leaves at once: whole, one dtype.
Such parameters are plain tensors with plain gradients, as under DDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ourshard.runtime.buffer import Slot
from ourshard.runtime.handle import ShardGradient, become_handle, gradient_handle
from ourshard.runtime.inventory import Parameter
from ourshard.runtime.layout import LaneLayout, RowRange
from ourshard.runtime.ledger import Kind
from ourshard.runtime.peer import Reduction
from ourshard.runtime.placement import At, Placement

if TYPE_CHECKING:
    from ourshard.runtime.optim import Run
    from ourshard.runtime.unit import Unit


@dataclass(frozen=True, slots=True)
class LaneKey:
    """What the tensors of one lane have in common."""

    placement: Placement
    store_dtype: torch.dtype  # of the master
    compute_dtype: torch.dtype
    trainable: bool


class Lane:
    """One lane of one unit: Note [Buffers of a lane]."""

    def __init__(self, unit: Unit, layout: LaneLayout, parameters: list[Parameter], reduce_dtype: torch.dtype) -> None:
        key = layout.key
        assert isinstance(key, LaneKey)
        self.unit = unit
        self.layout = layout
        self.placement = key.placement
        self.trainable = key.trainable
        self.store_dtype = key.store_dtype
        self.compute_dtype = key.compute_dtype
        self.parameters = [parameters[tensor.index] for tensor in layout.tensors]
        mesh = unit.engine.mesh
        self.axis = mesh.shard
        self.device = mesh.device
        self.rank = mesh.world.rank
        self.reduce_dtype = reduce_dtype
        self.whole_gradients = self.placement.grads is At.WHOLE
        self.direct = self.placement.whole and key.store_dtype == key.compute_dtype
        self.stale = True  # `full` does not show the masters
        self.arriving: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None  # see `gradient`
        self._gradient_nbytes = 0  # as the ledger has them
        self.touched = [False] * len(self.parameters)  # this rank's backward gave a gradient, not dropped since
        self.valid = [False] * len(self.parameters)  # some rank's did; known once the ranks have told each other
        self._reduced_version = -1  # of `arriving`, where whole gradients stay in it
        self.is_lent = False  # `arriving` is a piece of the peers' arena
        self._lent_views: tuple[tuple[int, torch.dtype], list[torch.Tensor]] | None = None
        self.accumulated = False  # `gradient` holds a sum; else the next reduction overwrites it
        self.runs: list[Run] = []  # what optimizers step of this lane; set when one adopts it
        self._make_buffers()
        self.leaves: list[nn.Parameter] = []
        self.resting: list[nn.Parameter] = [p.tensor for p in self.parameters]

    # ---- buffers -------------------------------------------------------------------------------------------

    def _make_buffers(self) -> None:
        ledger = self.unit.engine.ledger
        numel, shard = self.layout.numel, self.layout.shard_numel
        self.full = Slot(numel, self.compute_dtype, self.device, self._full_kind, ledger)
        start = self.axis.rank * shard
        self.segment = self.full.tensor[start : start + shard]
        own = self.full.tensor if self.placement.master is At.WHOLE else self.segment
        self.aliased = self.placement.params is At.WHOLE and self.store_dtype == self.compute_dtype
        if self.aliased:
            self.master = own
        else:
            self.master = torch.zeros(own.numel(), dtype=self.store_dtype, device=self.device)
            if ledger is not None:
                ledger.hold(Kind.MASTER, self.master.nbytes)
        self.full.tensor.zero_()

    @property
    def _full_kind(self) -> Kind:
        if self.placement.params is At.SHARD:
            return Kind.SLOT
        return Kind.MASTER if self.direct else Kind.FULL

    def whole_view(self, buffer: torch.Tensor, position: int) -> torch.Tensor:
        """Return the view of one parameter, whole shape, in a flat buffer of the whole lane."""
        tensor = self.layout.tensors[position]
        return buffer[tensor.offset : tensor.stop].view(self.parameters[position].shape)

    def rows(self, position: int) -> RowRange:
        """Return the rows of a parameter in this rank's master (all of them where masters are whole)."""
        if self.placement.master is At.WHOLE:
            tensor = self.layout.tensors[position]
            return RowRange(0, tensor.rows, tensor.offset)
        return self.layout.rows_on(position, self.axis.rank)

    def rows_view(self, buffer: torch.Tensor, position: int) -> torch.Tensor:
        """Return this rank's rows of one parameter in a flat buffer of master layout; shape (rows, ...).

        Where a cut falls inside of rows (fused experts over many ranks), the shape is (pieces, elements of a piece).
        """
        rows, tensor = self.rows(position), self.layout.tensors[position]
        flat = buffer[rows.offset : rows.offset + rows.numel(tensor.granule)]
        shape = row_shape(self.parameters[position].shape, rows.rows)
        return flat.view(shape if math.prod(shape) == flat.numel() else (rows.rows, tensor.granule))

    def local_rows(self, position: int) -> torch.Tensor:
        return self.rows_view(self.master, position)

    def name_of(self, position: int) -> str:
        return self.parameters[position].name

    # ---- taking the model's parameters over ----------------------------------------------------------------

    def load(self, whole: torch.Tensor) -> None:
        """Fill the master from a flat buffer of the whole lane, any floating dtype."""
        if self.placement.master is At.WHOLE:
            self.master.copy_(whole)
        else:
            start = self.axis.rank * self.layout.shard_numel
            self.master.copy_(whole[start : start + self.layout.shard_numel])
        self.stale = True

    def take_over(self) -> None:
        """Make leaves; turn the user's parameters into handles, or into views of the masters where those are whole."""
        for position, parameter in enumerate(self.parameters):
            tensor = parameter.tensor
            if self.direct:
                tensor = _point(tensor, self.whole_view(self.full.tensor, position))
                self.leaves.append(tensor)
                continue
            self.leaves.append(self._make_leaf(tensor, self.whole_view(self.full.tensor, position)))
            if self.placement.whole:
                _point(tensor, self.whole_view(self.master, position))
            else:
                become_handle(tensor, self, position)
        if self.placement.params is At.SHARD:
            self.full.free()

    def _make_leaf(self, tensor: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        """Return the parameter that computes in place of `tensor`; keeps subclass, attributes and gradient hooks."""
        leaf = torch.Tensor._make_subclass(type(tensor), view.new_empty(0), tensor.requires_grad)
        leaf.__dict__.update(tensor.__dict__)
        leaf.data = view
        for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
            leaf.register_hook(hook)
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            leaf.register_post_accumulate_grad_hook(hook)
        assert isinstance(leaf, nn.Parameter)
        return leaf

    # ---- whole parameters ----------------------------------------------------------------------------------

    def fill(self) -> None:
        """Bring the whole parameters into `full` (on the current stream)."""
        if self.placement.params is At.WHOLE and not self.stale:
            return
        self.stale = False
        if self.direct:
            return
        if self.placement.whole:
            self.full.tensor.copy_(self.master)
            return
        if not self.aliased:
            self.segment.copy_(self.master)
        self.unit.engine.collectives.fill_slot(self.full.tensor, self.segment, self.axis, self.unit.label)

    def gather_master(self) -> torch.Tensor:
        """Return the whole lane in store dtype, exact. Collective where masters are shards."""
        if self.placement.master is At.WHOLE:
            return self.master
        whole = torch.empty(self.layout.numel, dtype=self.store_dtype, device=self.device)
        start = self.axis.rank * self.layout.shard_numel
        segment = whole[start : start + self.layout.shard_numel]
        segment.copy_(self.master)
        self.unit.engine.collectives.all_gather(whole, segment, self.axis, self.unit.label)
        return whole

    def recast(self, dtype: torch.dtype) -> None:
        """Compute in another dtype from now on, as `model.to(dtype)` asks. Masters keep theirs."""
        if dtype == self.compute_dtype:
            return
        if self.aliased:
            self.master = self.master.clone()
            self.aliased = False
            self._hold(Kind.MASTER, self.master)
        self.full.free()
        self.compute_dtype = dtype
        self.full = Slot(self.layout.numel, dtype, self.device, self._full_kind, self.unit.engine.ledger)
        start = self.axis.rank * self.layout.shard_numel
        self.segment = self.full.tensor[start : start + self.layout.shard_numel]
        for position, leaf in enumerate(self.leaves):
            leaf.grad = None
            leaf.data = self.whole_view(self.full.tensor, position)
        self.stale = True
        if self.placement.params is At.SHARD:
            self.full.free()

    def follow_requires_grad(self, master_dtype: torch.dtype) -> bool:
        """Take over a `requires_grad` that the user toggled; return whether the lane became trainable."""
        for handle, leaf in zip(self.resting, self.leaves, strict=True):
            if leaf.requires_grad != handle.requires_grad:
                leaf.requires_grad_(handle.requires_grad)
        if self.trainable or not any(leaf.requires_grad for leaf in self.leaves):
            return False
        self.trainable = True
        if self.store_dtype != master_dtype:
            self._hold(Kind.MASTER, self.master, -1)
            self.store_dtype = master_dtype
            self.master = self.master.to(master_dtype)
            self._hold(Kind.MASTER, self.master)
        return True

    # ---- gradients -----------------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Say whether backward left a gradient that has not been reduced."""
        if self.direct:
            return any(not self._is_reduced(position) for position in range(len(self.leaves)))
        return self.arriving is not None or any(leaf.grad is not None for leaf in self.leaves)

    def has_gradients(self) -> list[bool]:
        """Say which parameters have a gradient from this rank's backwards, not dropped since."""
        return [touched or leaf.grad is not None for touched, leaf in zip(self.touched, self.leaves, strict=True)]

    def _is_reduced(self, position: int) -> bool:
        """Say whether the gradient of a direct leaf is what the last reduction left: nothing was added since."""
        grad = self.leaves[position].grad
        if grad is None:
            return True
        return self.arriving is not None and self._is_in_place(position) and grad._version == self._reduced_version

    def _is_in_place(self, position: int) -> bool:
        """Say whether the gradient of a direct leaf is a view of `arriving`."""
        grad = self.leaves[position].grad
        assert grad is not None
        assert self.arriving is not None
        return grad.data_ptr() == self.arriving.data_ptr() + self.layout.tensors[position].offset * grad.element_size()

    def take_gradients(self, reduce_next: bool) -> None:
        """Move the leaves' gradients into `arriving`, where they add up until the next reduction.

        Gradients that wait for a later backward wait in master dtype, so that adding loses nothing.
        """
        if self.direct:
            self._take_direct()
            return
        self._drop_released()
        fresh = self.arriving is None
        if self.arriving is None:
            self.arriving = self._make_arriving(reduce_next)
        views, grads, missing = [], [], []
        wholes = self._whole_views(self.arriving)
        for position, leaf in enumerate(self.leaves):
            if leaf.grad is None:
                missing.append(position)
                continue
            views.append(wholes[position])
            grads.append(leaf.grad)
            self.touched[position] = True
            leaf.grad = None
        if fresh:
            self._zero_gaps(self.arriving, missing)
        if views:
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(views, grads)

    def _whole_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return `whole_view` of every parameter; made once for a buffer that comes back, as the arena does."""
        if not self.is_lent:
            return [self.whole_view(buffer, position) for position in range(len(self.parameters))]
        where = (buffer.data_ptr(), buffer.dtype)
        if self._lent_views is None or self._lent_views[0] != where:
            views = [self.whole_view(buffer, position) for position in range(len(self.parameters))]
            self._lent_views = (where, views)
        return self._lent_views[1]

    def _make_arriving(self, reduce_next: bool) -> torch.Tensor:
        peer = self.unit.engine.peer
        if reduce_next and peer is not None and not self.placement.whole:
            lent = peer.lend(self.layout.numel, self.reduce_dtype)
            if lent is not None:
                self.is_lent = True
                return lent
        dtype = self.reduce_dtype if reduce_next else self.store_dtype
        buffer = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
        self._hold(self._arriving_kind, buffer)
        return buffer

    @property
    def gradient(self) -> torch.Tensor | None:
        """Return the flat reduced gradient.

        Once handed out it is kept alive by the optimizer's gradients alone, which are views of it, so that `zero_grad`
        frees it.
        """
        if self._gradient is None:
            for run in self.runs:
                view = run.parameter.grad
                if run.handed_out and view is not None and run.stop > run.start:
                    return self._around(view, run)
        return self._gradient

    def _around(self, view: torch.Tensor, run: Run) -> torch.Tensor:
        storage = view.untyped_storage()
        if view.storage_offset() != run.start or storage.nbytes() != self.master.numel() * view.element_size():
            raise RuntimeError(
                f"The gradient of {self.name_of(run.positions[0])!r} was replaced by another tensor; change sharded "
                "gradients in place, or set them to None."
            )
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, (self.master.numel(),), (1,))

    @property
    def _arriving_kind(self) -> Kind:
        return Kind.GRADIENT if self.whole_gradients else Kind.REDUCE

    def _take_direct(self) -> None:
        """Make each `p.grad` a view of `arriving`, so that backward adds into it: whole gradients stay in place."""
        if self.arriving is None:
            self.arriving = torch.zeros(self.layout.numel, dtype=self.store_dtype, device=self.device)
            self._hold(Kind.GRADIENT, self.arriving)
        for position, leaf in enumerate(self.leaves):
            view = self.whole_view(self.arriving, position)
            self.touched[position] = leaf.grad is not None
            if leaf.grad is None:
                view.zero_()
            elif not self._is_in_place(position):
                view.copy_(leaf.grad)
                leaf.grad = view

    def _zero_gaps(self, buffer: torch.Tensor, missing: list[int]) -> None:
        end = 0
        for position, tensor in enumerate(self.layout.tensors):
            if tensor.offset > end:
                buffer[end : tensor.offset].zero_()
            if position in missing:
                buffer[tensor.offset : tensor.stop].zero_()
            end = tensor.stop
        if end < self.layout.numel:
            buffer[end:].zero_()

    def reduce(self, sync: bool) -> torch.Tensor | None:
        """Reduce `arriving` over the mesh into `gradient`, on the current stream.

        Mean over the shard axis always, over `replicate` when `sync`. Returns the buffer that the reduction read, for
        the caller to keep until the stream has passed; None where it is the gradient at rest.
        """
        assert self.arriving is not None
        engine = self.unit.engine
        buffer = self.arriving.to(self.reduce_dtype)  # itself, where the dtype is that
        if self.direct:
            engine.reducer.mean(buffer, engine.mesh.world, self.unit.label)
            if buffer is not self.arriving:
                self.arriving.copy_(buffer)
            self._reduced_version = self.arriving._version
            return None if buffer is self.arriving else buffer
        self._hold(self._arriving_kind, self.arriving, -1)
        self.arriving = None
        if self.placement.whole:
            engine.reducer.mean(buffer, engine.mesh.world, self.unit.label)
            self._accumulate(buffer, sync=False)
            return buffer
        start = self.axis.rank * self.layout.shard_numel
        segment = buffer[start : start + self.layout.shard_numel]
        engine.reducer.mean_scatter(segment, buffer, self.axis, self.unit.label)
        self._accumulate(segment, sync)
        return buffer

    def lent_reduction(self, sync: bool) -> Reduction:
        """Describe the reduction of `arriving` in the arena; `end_loan` must follow it."""
        assert self.arriving is not None
        if sync and self.unit.engine.mesh.replicate.size > 1:
            return Reduction(self.arriving, self._lent_segment(), add=False)
        gradient, first = self._open_gradient(self.layout.shard_numel)
        self.accumulated = True
        return Reduction(self.arriving, gradient, add=not first)

    def _lent_segment(self) -> torch.Tensor:
        assert self.arriving is not None
        return self.arriving.view(self.axis.size, -1)[self.axis.rank]

    def end_loan(self, sync: bool) -> None:
        """Give the arena back, after the reduction that `lent_reduction` described."""
        if sync and self.unit.engine.mesh.replicate.size > 1:
            self._accumulate(self._lent_segment(), sync)
        self.arriving = None
        self.is_lent = False

    def _open_gradient(self, numel: int) -> tuple[torch.Tensor, bool]:
        """Return `gradient`, held, and whether nothing has been accumulated in it."""
        gradient = self.gradient
        first = not self.accumulated or gradient is None
        if gradient is None:
            gradient = torch.empty(numel, dtype=self.store_dtype, device=self.device)
            self._hold_gradient(gradient.nbytes)
        self._gradient = gradient
        return gradient, first

    def _accumulate(self, segment: torch.Tensor, sync: bool) -> None:
        """Add a reduced segment to `gradient`; when `sync`, make the sum the mean over `replicate`."""
        engine = self.unit.engine
        gradient, first = self._open_gradient(segment.numel())
        replicated = sync and engine.mesh.replicate.size > 1
        if replicated and first:
            engine.reducer.mean(segment, engine.mesh.replicate, self.unit.label)
        if first:
            gradient.copy_(segment)
        else:
            gradient.add_(segment)
        if replicated and not first:
            segment.copy_(gradient)
            engine.reducer.mean(segment, engine.mesh.replicate, self.unit.label)
            gradient.copy_(segment)
        self.accumulated = True

    def settle(self, flags: list[bool]) -> None:
        """Take in which parameters have a gradient on any rank, and show gradients where the user looks for them."""
        self.valid = flags
        if self.placement.whole:
            buffer = self.arriving if self.direct else self.gradient
            if buffer is not None:
                for position, parameter in enumerate(self.resting):
                    if flags[position] and parameter.grad is None:
                        parameter.grad = self.whole_view(buffer, position)
        for run in list(self.runs):
            run.hand_out()
        if not self.placement.whole and self._all_handed_out():
            self._gradient = None

    def _all_handed_out(self) -> bool:
        """Say whether optimizers hold all that `gradient` has."""
        held = {position for run in self.runs if run.handed_out for position in run.positions}
        return all(position in held for position, valid in enumerate(self.valid) if valid)

    def _drop_released(self) -> None:
        """Notice gradients that `zero_grad(set_to_none=True)` of an optimizer, or of a plain parameter, dropped."""
        if self.placement.whole:
            for position, parameter in enumerate(self.resting):
                if self.valid[position] and parameter.grad is None:
                    self.drop_gradient(position)
        released = [run for run in self.runs if run.handed_out and run.parameter.grad is None]
        for run in released:
            run.handed_out = False
        if sum(len(run.positions) for run in released) == len(self.parameters):
            self._drop_all()
            return
        for run in released:
            for position in run.positions:
                self.drop_gradient(position)

    def _drop_all(self) -> None:
        self.valid = [False] * len(self.parameters)
        self.touched = [False] * len(self.parameters)
        self._forget_all()

    def drop_gradient(self, position: int) -> None:
        """Forget the gradient of one parameter, as `p.grad = None` does."""
        had = self.valid[position] or self.touched[position]
        self.valid[position] = self.touched[position] = False
        if self.direct:
            return
        if not any(self.valid) and not any(self.touched):
            self._forget_all()
        elif had:
            if self.gradient is not None:
                self.rows_view(self.gradient, position).zero_()
            if self.arriving is not None:
                self.whole_view(self.arriving, position).zero_()
        for run in self.runs:
            if position in run.positions:
                run.dropped()

    def _forget_all(self) -> None:
        self.accumulated = False
        if not self.placement.whole:
            self._gradient = None
            self._hold_gradient(0)
        if self.arriving is not None:
            self._hold(self._arriving_kind, self.arriving, -1)
            self.arriving = None

    def zero_gradient(self, position: int) -> None:
        """Set the gradient of one parameter to zero, as `p.grad.zero_()` does."""
        if self.gradient is not None:
            self.rows_view(self.gradient, position).zero_()
        if self.arriving is not None:
            self.whole_view(self.arriving, position).zero_()

    def local_gradient_rows(self, position: int) -> torch.Tensor:
        if self.gradient is None:
            raise RuntimeError(
                f"The gradient of {self.name_of(position)!r} has not been reduced yet: this backward did not sync "
                "(accumulation with deferred reduction)."
            )
        return self.rows_view(self.gradient, position)

    def gradient_handle(self, position: int) -> ShardGradient | None:
        """Return what `p.grad` shows: a handle if the parameter has a gradient, else None."""
        self._drop_released()
        if not self.valid[position] and not self.touched[position]:
            return None
        return gradient_handle(self, position, self.parameters[position].shape, self.store_dtype)

    def _hold_gradient(self, nbytes: int) -> None:
        """Tell the ledger the bytes of `gradient`; 0 once `zero_grad` is known to have freed it."""
        if self.unit.engine.ledger is not None:
            self.unit.engine.ledger.hold(Kind.GRADIENT, nbytes - self._gradient_nbytes)
            self._gradient_nbytes = nbytes

    def _hold(self, kind: Kind, tensor: torch.Tensor, sign: int = 1) -> None:
        if self.unit.engine.ledger is not None:
            self.unit.engine.ledger.hold(kind, sign * tensor.nbytes)


def row_shape(shape: Iterable[int], rows: int) -> tuple[int, ...]:
    """Return `shape` with its first dimension longer than 1 cut to `rows` and the ones before it dropped."""
    rest = list(shape)
    while rest and rest[0] == 1:
        rest.pop(0)
    return (rows, *rest[1:])


def _point(tensor: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
    """Make `tensor` show `view`, keeping its identity; also where it was on another device or on meta."""
    if tensor.device != view.device:
        twin = torch.Tensor._make_subclass(type(tensor), view, tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, twin)
    tensor.data = view
    return tensor
