"""The buffers of a lane on this rank, and the parameters that live in them.

Note [Buffers of a lane]
------------------------
full      whole parameters in compute dtype; leaves are views of it. Empty at rest where parameters are sharded.
master    what the optimizer updates: this rank's shard, or the whole lane where masters are whole. For a frozen lane
          it is the stored shard, in the dtype it was loaded in. Where the dtypes agree and parameters are whole, it is
          a part of `full`, not a copy.
arriving  whole gradients in reduce dtype: filled by backward, reduced, then empty (or kept, where gradients are whole
          at rest or a sync is deferred).
gradient  reduced gradients in master dtype, accumulated over micro-batches: the shard, or the whole lane.
shard     where masters are on the host (Note [Masters on the host] in host.py), or divided (Note [Divided masters]):
          this rank's shard in compute dtype.
secondary where the config asks for one: this rank's part of the whole within its node. Note [Secondary shard].

A lane is `direct` when the parameters that the user holds are the masters and the leaves at once: whole, one dtype.
Such parameters are plain tensors with plain gradients, as under DDP.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from ourshard.config import Tier
from ourshard.runtime.buffer import Slot
from ourshard.runtime.coded import weight_codec
from ourshard.runtime.coded_gradients import GradientCoder, gradient_codec
from ourshard.runtime.disk import ShardWindows
from ourshard.runtime.handle import become_handle
from ourshard.runtime.identity import take_content
from ourshard.runtime.inventory import Parameter
from ourshard.runtime.lane_key import LaneKey
from ourshard.runtime.layout import LaneLayout, RowRange
from ourshard.runtime.ledger import Kind
from ourshard.runtime.placement import At
from ourshard.runtime.secondary import SecondaryShard
from ourshard.runtime.shown import note_leaves
from ourshard.runtime.states import Column
from ourshard.runtime.strays import StrayGradients

if TYPE_CHECKING:
    from ourshard.runtime.behind import Stepping
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.unit import Unit


class LaneStore:
    """The buffers of one lane of one unit, and the parameters that live in them: Note [Buffers of a lane]."""

    def __init__(self, unit: Unit, layout: LaneLayout, parameters: list[Parameter]) -> None:
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
        self.axis = mesh.shard  # that gathers and reductions go over first
        self.divided = self.placement.divided  # Note [Divided masters] in divided.py
        self.spread = mesh.world if self.divided else mesh.shard  # the ranks that have parts of the masters
        self.parts = mesh.parts if self.divided else tuple(range(mesh.shard.size))  # of the ranks of `spread`
        self.part = self.parts[self.spread.rank]
        self.device = mesh.device
        self.rank = mesh.world.rank
        self.direct = self.placement.whole and key.store_dtype == key.compute_dtype
        self.offloaded = key.tier is not Tier.NONE
        self.on_disk = key.tier is Tier.NVME
        self.stepping: Stepping | None = None  # a step that is under way: Note [Overlapped steps] in behind.py
        self.stale = True  # `full` does not show the masters
        self.sent = False  # though stale, what `fill` copies from shows them: `send_up` was called since
        communication = unit.engine.config.communication
        self.codec = weight_codec(communication) if key.coded else None
        codec = gradient_codec(communication) if key.coded else None
        self.coder: GradientCoder | None = None
        if codec is not None:
            number = unit.index << 16 | layout.tensors[0].index
            self.coder = GradientCoder(unit.engine, codec, unit.label, number, layout.numel)
            if self.trainable:
                self.coder.make_residuals()
        self.shows_coded = False  # `full` has what the codec left of the masters
        self.secondary: SecondaryShard | None = None
        self._make_buffers()
        self.leaves: list[nn.Parameter] = []
        self.resting: list[nn.Parameter] = [p.tensor for p in self.parameters]
        self._strays = StrayGradients(cast("Lane", self))
        self.left: dict[int, Left] = {}  # by position, of leaves that graphs have saved

    @property
    def master(self) -> torch.Tensor:
        """Return the master as it is after the last step."""
        if self.stepping is not None:
            self.await_step()
        return self._master

    @master.setter
    def master(self, master: torch.Tensor) -> None:
        self._master = master

    def await_step(self) -> None:
        """Return when no step of the lane is under way; raises what it raised."""
        stepping, self.stepping = self.stepping, None
        if stepping is not None:
            stepping.wait()

    # ---- buffers -------------------------------------------------------------------------------------------

    def _make_buffers(self) -> None:
        ledger = self.unit.engine.ledger
        self._make_full()
        own = self.full.tensor if self.placement.whole else self.own
        same = self.placement.params is At.WHOLE and self.store_dtype == self.compute_dtype
        self.aliased = same and not self.offloaded
        self.shard: torch.Tensor | None = None
        self.passes_disk = False  # gathers start from what rests on a disk
        self._state_memory: dict[Column, torch.Tensor] = {}  # of masters on the host
        if self.on_disk:
            self.master = self._take_disk(self.layout.shard_numel, self.store_dtype, stepped=self.trainable)
            if not self.trainable:
                self._pass_disk(self.master)
        elif self.offloaded:
            self.master = self.take_host(own.numel())
        elif self.aliased:
            self.master = own
        else:
            self.master = torch.zeros(own.numel(), dtype=self.store_dtype, device=self.device)
            if ledger is not None:
                ledger.hold(Kind.MASTER, self.master.nbytes)
        if self._has_shard:
            self._make_shard()
        self._make_secondary()
        self.full.tensor.zero_()

    def _make_full(self) -> None:
        self.full = Slot(self.layout.numel, self.compute_dtype, self.device, self._full_kind, self.unit.engine.ledger)
        self.segment = self.segment_of(self.full.tensor)
        self.own = self.own_of(self.full.tensor)

    def segment_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, on the shard axis, of a flat buffer of the whole lane."""
        if self.placement.whole:
            return whole
        numel = self.layout.numel // self.axis.size
        return whole[self.axis.rank * numel : (self.axis.rank + 1) * numel]

    def own_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank's master stands for in a flat buffer of the whole lane."""
        if self.placement.whole:
            return whole
        start = self.part * self.layout.shard_numel
        return whole[start : start + self.layout.shard_numel]

    def own_in(self, segment: torch.Tensor) -> torch.Tensor:
        """Return what this rank's master stands for in its segment: all of it, unless masters are divided."""
        start = self.part * self.layout.shard_numel - self.axis.rank * segment.numel()
        return segment[start : start + self.layout.shard_numel]

    def _make_secondary(self) -> None:
        mesh = self.unit.engine.mesh
        wanted = self.unit.engine.config.secondary_shard_size is not None and mesh.node.size > 1
        if wanted and self.placement.params is At.SHARD and not self.unit.rooted:
            self.secondary = SecondaryShard(self.full.tensor, mesh.node, self.unit.engine.ledger)

    def take_host(self, numel: int) -> torch.Tensor:
        """Return host memory for a master or a gradient."""
        host = self.unit.engine.host
        assert host is not None
        buffer = host.take(numel, self.store_dtype)
        self.hold(Kind.HOST, buffer)
        return buffer

    def state_memory(self, column: Column) -> torch.Tensor:
        """Return host memory, one value an element of the master, for a state of the optimizer; taken once."""
        if column not in self._state_memory:
            host = self.unit.engine.host
            assert host is not None
            self._state_memory[column] = host.take(self.layout.shard_numel, column.dtype, travels=False)
            self.hold(Kind.STATES, self._state_memory[column])
        return self._state_memory[column]

    def _take_disk(self, numel: int, dtype: torch.dtype, *, stepped: bool = False) -> torch.Tensor:
        disk = self.unit.engine.disk
        assert disk is not None
        return disk.take(numel, dtype, stepped=stepped)

    def _make_shard(self) -> None:
        numel, tier, key = self.segment.numel(), self._shard_tier, self.layout.key
        assert isinstance(key, LaneKey)
        if tier is Tier.NONE:
            self.shard = torch.empty(numel, dtype=self.compute_dtype, device=self.device)
        elif not replace(key, compute_dtype=self.compute_dtype).has_own_shard:
            self.shard = None  # the master serves
        elif tier is Tier.NVME:
            self.shard = self._take_disk(numel, self.compute_dtype)
            self._pass_disk(self.shard)
        else:
            assert self.unit.engine.host is not None
            self.shard = self.unit.engine.host.take(numel, self.compute_dtype)
        if self.shard is not None and not self.passes_disk:
            self.hold(self._shard_kind, self.shard)

    def _pass_disk(self, resting: torch.Tensor) -> None:
        """Let gathers start from `resting` on the disk: Note [Parameters on a disk] in offload/parameters.py."""
        assert self.unit.engine.disk is not None
        self.unit.engine.disk.shards.add(cast("Lane", self), resting)
        self.passes_disk = True

    @property
    def gathers(self) -> bool:
        """Say whether the parameters are brought in again and again: by a collective, a copy from below, or a cast.

        A rank that is alone casts masters on its device each time only where parameters are not to stay there.
        """
        apart = self.axis.size > 1 or self.divided or self.offloaded or self._shard_tier is not Tier.NONE
        return self.placement.params is At.SHARD and apart

    @property
    def _has_shard(self) -> bool:
        return self.placement.params is At.SHARD and self.trainable and (self.offloaded or self.divided)

    @property
    def _shard_tier(self) -> Tier:
        return self.unit.engine.config.offload.params

    @property
    def rests_below(self) -> bool:
        """Say whether what gathers start from is kept where `offload.params` says: else a master above serves."""
        below = self._shard_tier is not Tier.NONE
        return below and self.placement.params is At.SHARD and (self.offloaded or self.divided)

    @property
    def _shard_kind(self) -> Kind:
        return Kind.SHARD if self._shard_tier is Tier.NONE else Kind.HOST

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
        return self.layout.rows_on(position, self.part)

    def span(self, position: int) -> slice:
        """Return where a flat buffer of master layout has a parameter's rows and the padding beside them."""
        if self.placement.master is At.WHOLE:
            return self.layout.joined(self.layout.world).span_on(position, 0)
        return self.layout.span_on(position, self.part)

    def rows_view(self, buffer: torch.Tensor, position: int) -> torch.Tensor:
        """Return this rank's rows of one parameter in a flat buffer of master layout; shape (rows, ...).

        Where a cut falls inside of rows (fused experts over many ranks), the shape is (pieces, elements of a piece).
        """
        rows, tensor = self.rows(position), self.layout.tensors[position]
        flat = buffer[rows.offset : rows.offset + rows.numel(tensor.granule)]
        shape = row_shape(self.parameters[position].shape, rows.rows)
        return flat.view(shape if math.prod(shape) == flat.numel() else (rows.rows, tensor.granule))

    def local_rows(self, position: int) -> torch.Tensor:
        """Return `rows_view` of the master. Raises RuntimeError where it was on a disk and is lost."""
        self.check_disk()
        return self.rows_view(self.master, position)

    def stored(self, position: int) -> torch.Tensor:
        """Return what holds this rank's values of a parameter between steps.

        A whole parameter that the user holds may have been moved (`model.to(dtype)`): it is the truth.
        """
        return (self.resting[position] if self.placement.whole else self.local_rows(position)).detach()

    def check_disk(self) -> None:
        """Raise RuntimeError where the master was on a disk and is lost: before it is read outside of a step."""
        if self.on_disk:
            assert self.unit.engine.disk is not None
            self.unit.engine.disk.check()

    def name_of(self, position: int) -> str:
        return self.parameters[position].name

    # ---- taking the model's parameters over ----------------------------------------------------------------

    def load(self, whole: torch.Tensor) -> None:
        """Fill the master from a flat buffer of the whole lane, any floating dtype."""
        self.master.copy_(self.own_of(whole))
        self.mark_stale()

    def take_over(self) -> None:
        """Make leaves; turn the user's parameters into handles, or into views of the masters where those are whole."""
        shown = [parameter.views_of_itself() for parameter in self.parameters]
        for position, parameter in enumerate(self.parameters):
            tensor = parameter.tensor
            if self.direct:
                tensor = point(tensor, self.whole_view(self.full.tensor, position))
                self.leaves.append(tensor)
                continue
            self.leaves.append(self._make_leaf(tensor, self.whole_view(self.full.tensor, position)))
            if not self.placement.whole:
                become_handle(tensor, cast("Lane", self), position)
        if self.placement.whole and not self.direct:
            self._point_to_masters()
        for names, *objects in zip(shown, self.leaves, self.resting, strict=True):
            for name, tensor in itertools.product(names, objects):
                setattr(tensor, name, tensor.data)
        self.watch_strays()
        self._note_leaves()
        if self.placement.params is At.SHARD:
            self.full.count_own()
            self.full.free()

    def _note_leaves(self) -> None:
        if not self.direct:
            note_leaves(cast("Lane", self))

    def watch_strays(self) -> None:
        """Let gradients that reach what the user holds go to the leaves: Note [Stray gradients] in strays.py."""
        if not self.direct:
            self._strays.watch()

    def _make_leaf(self, tensor: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        """Return the parameter that computes in place of `tensor`; keeps subclass and attributes.

        Both have the same gradient hooks from then on, so that those which the user adds or removes later count; those
        on a handle go to its leaf. A parameter without hooks has no place for them either: an empty one costs backward
        1 us a parameter.
        """
        leaf = torch.Tensor._make_subclass(type(tensor), view.new_empty(0), tensor.requires_grad)
        leaf.__dict__.update(tensor.__dict__)
        leaf.data = view
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name)
            if hooks or self.placement.whole:
                hooks = hooks or OrderedDict()
                setattr(tensor, name, hooks)
                setattr(leaf, name, hooks)
        assert isinstance(leaf, nn.Parameter)
        return leaf

    # ---- whole parameters ----------------------------------------------------------------------------------

    def mark_stale(self) -> None:
        """Note that the master changed."""
        self.stale, self.sent = True, False
        if not self.trainable:
            self._forget_window()  # else what rests there is written through windows alone
        if self.secondary is not None:
            self.secondary.forget()

    def _forget_window(self) -> None:
        if self.passes_disk:
            self._windows.forget(cast("Lane", self))

    @property
    def _windows(self) -> ShardWindows:
        assert self.unit.engine.disk is not None
        return self.unit.engine.disk.shards

    def _point_to_masters(self) -> None:
        """Let the whole parameters that the user holds be views of the masters."""
        for position, tensor in enumerate(self.resting):
            point(tensor, self.whole_view(self.master, position))

    def hold(self, kind: Kind, tensor: torch.Tensor, sign: int = 1) -> None:
        if self.unit.engine.ledger is not None:
            self.unit.engine.ledger.hold(kind, sign * tensor.nbytes)


class Left(NamedTuple):
    """The memory of a leaf that was left to a graph, and the uses of the leaf without that graph."""

    values: torch.Tensor
    uses: int


def uses_of(leaf: nn.Parameter) -> int:
    """Count what refers to a leaf besides Python, as graphs that have saved it do."""
    with torch._C.DisableTorchFunctionSubclass():  # of one that is closed, too
        count: int = leaf._use_count()  # type: ignore[attr-defined]
    return count


def row_shape(shape: Iterable[int], rows: int) -> tuple[int, ...]:
    """Return `shape` with its first dimension longer than 1 cut to `rows` and the ones before it dropped."""
    rest = list(shape)
    while rest and rest[0] == 1:
        rest.pop(0)
    return (rows, *rest[1:])


def point(tensor: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
    """Make `tensor` show `view`, keeping its identity; also where it was on another device or on meta."""
    if tensor.device != view.device:
        twin = torch.Tensor._make_subclass(type(tensor), view, tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        take_content(tensor, twin)
    tensor.data = view
    return tensor
