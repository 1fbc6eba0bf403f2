"""Inputs of recomputed units, on the host from forward to backward: `offload.activations: cpu`.

Note [Inputs on the host]
-------------------------
A recomputed unit keeps its inputs from forward to backward, and of all activations nothing else is left. `Inputs` is
asked by autograd for each tensor that a checkpoint saves (hooks on saved tensors, around the checkpoint alone):

* in forward the copy down begins at once, on the stream of copies. The device's tensor is kept until the next unit
  saves: then compute waits for the copy, and lets go. So one input is on its way, and the last unit's, which backward
  asks for first, need not come back;
* in backward the unit that asks has its inputs, and the copies up for the unit before it begin. Their memory is
  compute's own, so that one unit's inputs are there ahead and none is held for longer than its recomputation;
* what several units were given (the states of an encoder, a mask) is one input: it goes down once, comes up once, and
  stays until backward is over. It is known by its memory, place, shape and version, since each unit has a view of it;
* the bytes travel as they are, and come back with the same strides: recomputation sees no difference.

What stays where it is: tensors below `LEAST_NBYTES`, of integers, with gaps between their elements, parameters, leaves
that need a gradient (their owner keeps them) and subclasses. torch checks no version of what hooks save; a change in
place is found here, until the copy is over, and is an error as without offload.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ourshard.config import ShardConfig, Tier
from ourshard.runtime.host import HostMemory, PinBudget, memory_for_offload
from ourshard.runtime.host_pool import HostPool
from ourshard.runtime.ledger import Kind, Ledger
from ourshard.runtime.meter import Spent
from ourshard.runtime.streams import Streams

logger = logging.getLogger("ourshard")

# The two copies cost the host as much as some 0.1 ms of work, in which the link moves 5 MB; below this an input frees
# next to nothing: of a hundred units 100 MiB.
LEAST_NBYTES = 2**20

_LABEL = "inputs of units"
_CALLED = "_gradient_checkpointing_func"  # where modules of a Transformers model have their checkpoint


class Mover(Protocol):
    """Copies tensors to another place and back. What it returns of a copy that runs may be waited for."""

    def down(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        """Begin to copy; return what stands for the copy, and an event behind it."""

    def up(self, stored: Any, like: Layout) -> tuple[torch.Tensor, Any]:
        """Begin to copy back; return the tensor, and an event behind it."""

    def wait(self, event: Any) -> None:
        """Make compute wait for a copy."""

    def drop(self, stored: Any) -> None:
        """Forget a copy."""

    def hold(self, nbytes: int) -> None:
        """Hear that so much more of the device is held (or, if negative, less)."""


class Layout:
    """What a tensor is beside its bytes."""

    __slots__ = ("device", "dtype", "nbytes", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype, self.device, self.nbytes = tensor.dtype, tensor.device, tensor.nbytes

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return such a tensor without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class HostMover:
    """Copies to pinned host memory on the stream of copies; on a CPU to other memory, at once."""

    def __init__(self, streams: Streams, memory: HostMemory, ledger: Ledger | None) -> None:
        self._streams = streams
        self._pool = HostPool(memory, streams.land, ledger)
        self._ledger = ledger

    def down(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        buffer = self._pool.take(tensor.nbytes)
        with self._streams.copies() as queue:
            _as(buffer, tensor).copy_(tensor, non_blocking=True)
            event = queue.mark(None)
        self._count("to host", tensor.nbytes)
        return buffer, event

    def up(self, stored: torch.Tensor, like: Layout) -> tuple[torch.Tensor, Any]:
        tensor = like.empty(like.device)  # on the stream that will use it, and give it back
        with self._streams.copies() as queue:
            tensor.copy_(_as(stored, tensor), non_blocking=True)
            event = queue.mark(None)
        self._count("from host", tensor.nbytes)
        return tensor, event

    def wait(self, event: Any) -> None:
        self._streams.wait(event, Spent.INPUT, _LABEL)

    def drop(self, stored: torch.Tensor) -> None:
        self._pool.give_back(stored)

    def hold(self, nbytes: int) -> None:
        if self._ledger is not None:
            self._ledger.hold(Kind.INPUT, nbytes)

    def _count(self, way: str, nbytes: int) -> None:
        if self._ledger is not None:
            self._ledger.copied[way] += nbytes


def _as(buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the start of a buffer of bytes with the dtype, shape and strides of `tensor`."""
    return buffer[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Group:
    """The inputs that one checkpoint saved."""

    __slots__ = ("__weakref__", "before", "members")

    def __init__(self, before: _Group | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.members: list[weakref.ref[_Input]] = []

    def inputs(self) -> Iterable[_Input]:
        return (stored for stored in (member() for member in self.members) if stored is not None)


class _Input:
    """A tensor that is on the host or on its way there. Alive as long as something that autograd saved is."""

    __slots__ = (
        "__weakref__",
        "_mover",
        "changed",
        "event",
        "going",
        "here",
        "layout",
        "storage",
        "stored",
        "uses",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, mover: Mover) -> None:
        self.layout = Layout(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        self.here: torch.Tensor | None = tensor  # on the device
        self.going = True  # the copy down may still run
        self.changed = False  # while it did
        self.uses = 0  # of units
        self._mover = mover
        self.stored, self.event = mover.down(tensor)
        mover.hold(self.layout.nbytes)

    def land(self) -> None:
        """Make compute wait for the copy down."""
        if self.going:
            assert self.here is not None
            self.going = False
            self.changed = self.here._version != self.version
            self._mover.wait(self.event)

    def let_go(self) -> None:
        """Free the device's tensor, once compute has waited for the copy that reads or fills it."""
        if self.here is not None:
            self.here = None
            self._mover.hold(-self.layout.nbytes)

    def bring(self) -> None:
        """Begin to copy up, if the tensor is not there."""
        if self.here is None:
            self.here, self.event = self._mover.up(self.stored, self.layout)
            self._mover.hold(self.layout.nbytes)

    def arrive(self) -> None:
        """Make compute wait for the copy up."""
        self._mover.wait(self.event)

    def __del__(self) -> None:
        self.let_go()
        self._mover.drop(self.stored)


class _Use:
    """What autograd keeps in the place of a tensor that moves."""

    __slots__ = ("group", "stored")

    def __init__(self, stored: _Input, group: _Group) -> None:
        self.stored, self.group = stored, group
        stored.uses += 1


class _Kept:
    """What autograd keeps of a tensor that stays: its bytes, and the version that hooks would lose."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version


class Inputs:
    """The inputs of the recomputed units of one model: Note [Inputs on the host]."""

    def __init__(self, mover: Mover, plain: type = torch.Tensor) -> None:
        self._mover = mover
        self._plain = plain  # what tensors that move are; subclasses stay
        self._inside = False  # a checkpoint whose inputs move
        self._group: _Group | None = None  # of the checkpoint that was called last
        self._last: weakref.ref[_Group] | None = None
        self._going: list[weakref.ref[_Input]] = []  # down, of the group that began to move last
        self._rising: list[_Input] = []  # up, and compute has not waited for them
        self._common: weakref.WeakSet[_Input] = weakref.WeakSet()  # of several units, that are up
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Input] = weakref.WeakValueDictionary()
        self._callers: list[nn.Module] = []  # of a Transformers model, that call a checkpoint
        self._warned = False

    # ---- calls ---------------------------------------------------------------------------------------------

    def around(self, checkpoint: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `checkpoint(function, *args, **kwargs)`, and keep the tensors among `args` that it saves on the host."""
        if not self._applies():
            return checkpoint(function, *args, **kwargs)
        self._inside = True
        self._group = _Group(None if self._last is None else self._last())
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(function, *args, **kwargs)
        finally:
            if self._group.members:
                self._last = weakref.ref(self._group)
            self._inside, self._group = False, None

    def _applies(self) -> bool:
        """Say whether a checkpoint that is called now saves inputs for later, in no other one and for nobody else."""
        if self._inside or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return False  # nested, without gradient, or part of a recomputation
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # type: ignore[attr-defined]
            return True
        if not self._warned:
            self._warned = True
            logger.warning(
                "offload.activations: a unit runs inside of other hooks on saved tensors (a checkpoint around it, "
                "torch's save_on_cpu, TRL's activation_offloading), which get its inputs; leave one of the two out."
            )
        return False

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Go around the checkpoints of Transformers models, which their modules call by an attribute.

        Raises:
            ValueError: one has none; its code calls torch's checkpoint by itself.
        """
        self._callers = []
        for model in models:
            callers = [module for module in model.modules() if hasattr(module, _CALLED)]
            if not callers:
                raise ValueError(
                    f"offload.activations: {type(model).__name__} calls torch's checkpoint in its own code (the form "
                    "of transformers 4.34 and older), where its inputs can't be reached; use none, or a newer model "
                    "file."
                )
            self._callers += callers
        self._go_around()

    def _go_around(self) -> None:
        for module in self._callers:
            called = getattr(module, _CALLED)
            if not isinstance(called, partial) or called.func != self.around:
                setattr(module, _CALLED, partial(self.around, called))

    def begin_forward(self) -> None:
        """Begin a chain of units of its own: backward of this forward fetches nothing of an earlier one.

        A model that was told to recompute since then (`gradient_checkpointing_enable()`) has a checkpoint of its own.
        """
        self._last = None
        self._go_around()

    def end_backward(self) -> None:
        """Let go of what was brought up and not asked for, or asked for by several units."""
        for stored in self._rising:
            stored.arrive()
            stored.let_go()
        self._rising.clear()
        for stored in list(self._common):
            stored.let_go()
        self._common.clear()

    # ---- hooks of autograd ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor) -> Any:
        assert self._group is not None
        if type(tensor) is not self._plain or not _moves(tensor):
            return _Kept(tensor)
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (*place, tensor._version)
        stored = self._known.get(key)
        if stored is None or stored.storage() is not tensor.untyped_storage():  # an address may be another's by now
            stored = self._known[key] = self._send(tensor)
        return _Use(stored, self._group)

    def _send(self, tensor: torch.Tensor) -> _Input:
        assert self._group is not None
        if not self._group.members:
            self._release()
        stored = _Input(tensor.detach(), self._mover)
        member = weakref.ref(stored)
        self._group.members.append(member)
        self._going.append(member)
        return stored

    def _release(self) -> None:
        """Let go of the tensors that went down for the unit before."""
        for stored in (member() for member in self._going):
            if stored is not None and stored.going:
                stored.land()
                stored.let_go()
        self._going.clear()

    @torch.no_grad()
    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Kept):
            _refuse_changes(saved.tensor.shape, saved.tensor._version != saved.version)
            return saved.tensor
        stored: _Input = saved.stored
        stored.land()
        _refuse_changes(stored.layout.shape, stored.changed)
        if stored.here is None:
            stored.bring()
            stored.arrive()
        elif stored in self._rising:
            stored.arrive()
            self._rising.remove(stored)
        tensor = stored.here
        assert tensor is not None
        if stored.uses > 1:
            self._common.add(stored)
        else:
            stored.let_go()
        self._fetch(saved.group)
        return tensor

    def _fetch(self, group: _Group) -> None:
        """Begin to bring the inputs of the unit before up."""
        before = group.before() if group.before is not None else None
        if before is None or torch._C._current_graph_task_id() == -1:
            return
        for stored in before.inputs():
            if stored.here is None:
                stored.bring()
                self._rising.append(stored)


def _moves(tensor: torch.Tensor) -> bool:
    """Say whether an input is worth a copy, and frees memory by it: Note [Inputs on the host]."""
    if tensor.nbytes < LEAST_NBYTES or not tensor.is_floating_point() or (tensor.is_leaf and tensor.requires_grad):
        return False
    return tensor.layout is torch.strided and not tensor.is_neg() and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the elements fill a stretch of memory, in whatever order, each once."""
    expected = 1
    for stride, numel in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if numel != 1:
            if stride != expected:
                return False
            expected *= numel
    return True


def _refuse_changes(shape: torch.Size, changed: bool) -> None:
    if changed:
        raise RuntimeError(
            f"An input of a recomputed unit, of shape {tuple(shape)}, was changed in place after the unit was given "
            "it, and backward needs it as it was. Do not change inputs in place (`x = x + y` in the place of "
            "`x += y`), or clone them first."
        )


def on_host(
    config: ShardConfig, streams: Streams, device: torch.device, ledger: Ledger | None
) -> tuple[HostMemory | None, Inputs | None]:
    """Return what makes host memory for lanes, and what moves inputs of units there: None where they stay."""
    budget = PinBudget(config.offload.max_pinned)
    lanes = memory_for_offload(config.offload, device, budget)
    if config.offload.activations is Tier.NONE:
        return lanes, None
    memory = HostMemory(device, config.offload.pin_memory, budget, user="offload.activations")
    return lanes, Inputs(HostMover(streams, memory, ledger))
