"""What a model computes in one forward and backward, found by running it on fake tensors: no weights, no device.

Note [Fake run]
The model runs under torch's `FakeTensorMode`: shapes, dtypes, views, autograd and what it saves are real, values are
not. Every operation is seen on its way, so that
* matmul FLOPs, bytes that kernels read and write, and the number of kernels are counted by unit and phase;
* each new storage counts as held from its making to its end, which gives the activations that are alive at any
  moment, temporaries included. Parameters are not counted: they belong to the runtime, whose buffers `memory.py`
  counts. Gradients of parameters count while the visit that makes them goes on, and are the runtime's after it.
Mixed precision is followed as CUDA's autocast does it (`autocast.py`), whatever device this machine has.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ourshard.planning.autocast import CudaAutocast
from ourshard.planning.operations import is_attention, operation_flops
from ourshard.runtime.inputs import Inputs, Layout
from ourshard.runtime.recompute import checkpointed, is_cache, recomputes_itself

# They make a storage and start no kernel.
_ALLOCATIONS = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}


class UnitParts(NamedTuple):
    """What the fake run hears of a unit by: its modules, in order, or the parameters that complete it."""

    modules: Sequence[nn.Module]
    watched: Sequence[nn.Parameter] = ()  # of a rooted unit, which no boundary of a module ends


class Kernel(NamedTuple):
    """A kind of kernel: what one call computes and moves. `flops` is 0 for all but matrix products and attention."""

    flops: int
    nbytes: int
    attention: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """One stretch of work of one unit: from its boundary to the next one."""

    unit: int  # index among the units; the last is the root
    backward: bool
    kernels: Mapping[Kernel, int]  # how many of each kind
    peak: int  # most bytes of activations alive at once during it, all units' together
    alive: int  # bytes of activations alive at its end
    bounded: bool = True  # a gradient leaves the unit by its inputs; without, it counts as finished when backward is
    graded: tuple[int, ...] = ()  # rooted units whose gradients were complete in it, in order
    copied: int = 0  # bytes of inputs that begin to go to the host, or to come back
    awaits: bool = False  # compute waits for such copies that began before

    @property
    def flops(self) -> int:
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def calls(self) -> int:
        return sum(self.kernels.values())


@dataclass(frozen=True, slots=True)
class Trace:
    """The visits of one forward and backward, in order."""

    visits: tuple[Visit, ...]
    on_host: int = 0  # most bytes of inputs of units on the host at once

    @property
    def flops(self) -> int:
        return sum(visit.flops for visit in self.visits)

    @property
    def peak(self) -> int:
        """Most bytes of activations alive at once."""
        return max((visit.peak for visit in self.visits), default=0)


@dataclass(slots=True)
class _Open:
    """The visit that is going on."""

    unit: int
    backward: bool
    kernels: Counter[Kernel] = field(default_factory=Counter)
    peak: int = 0
    copied: int = 0
    awaits: bool = False


class _FlashAttention(TorchFunctionMode):
    """Let attention with dropout take the fused kernel, as it does on GPUs; the one for CPUs has no dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if len(args) <= 4 else {}
        return func(*args, **kwargs)


class _Meter(TorchDispatchMode):
    """Count operations and living storages, and cut them into visits."""

    def __init__(self, units: Sequence[UnitParts]) -> None:
        super().__init__()
        self.root = root = len(units) - 1
        self.merged = {index for index, unit in enumerate(units) if len(unit.modules) > 1}
        self.alive = 0
        self.visits: list[Visit] = []
        self.open = _Open(root, backward=False)
        self.bounded: set[int] = {root}
        self.fresh: list[torch.Tensor] = []  # parameters that got their gradient in the visit that is going on
        self.graded: list[int] = []  # rooted units whose gradients were complete in it
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave storages that were there before out of the count."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        fresh = [self._hold(value) for value in outputs]
        runs = (any(fresh) and func.overloadpacket not in _ALLOCATIONS) or (outputs and func._schema.is_mutable)
        if runs:
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            nbytes = sum(_nbytes(value) for value in (*inputs, *outputs))
            flops = operation_flops(func, args, kwargs or {}, out)
            self.open.kernels[Kernel(flops, nbytes, is_attention(func))] += 1
        return out

    def _hold(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return False
        self._known.add(storage)
        nbytes = storage.nbytes()
        self.alive += nbytes
        self.open.peak = max(self.open.peak, self.alive)
        weakref.finalize(storage, self._drop, nbytes)
        return True

    def _drop(self, nbytes: int) -> None:
        self.alive -= nbytes

    def turn_to(self, unit: int, backward: bool) -> None:
        """Close the visit that is going on and open one of `unit`."""
        if (unit, backward) == (self.open.unit, self.open.backward):
            return
        self.close()
        self.open = _Open(unit, backward, peak=self.alive)

    def close(self) -> None:
        for parameter in self.fresh:
            parameter.grad = None
        self.fresh.clear()
        done = self.open
        if done.kernels or self.graded:
            last = self.visits[-1] if self.visits else None
            same = last is not None and (last.unit, last.backward, last.graded) == (done.unit, done.backward, ())
            if last is not None and same and done.unit in self.merged:
                self.visits.pop()  # the next module of a merged unit
                done.kernels.update(last.kernels)
                done.peak = max(done.peak, last.peak)
                done.copied, done.awaits = done.copied + last.copied, done.awaits or last.awaits
            bounded, graded = done.unit in self.bounded, tuple(self.graded)
            kernels, copies = dict(done.kernels), (done.copied, done.awaits)
            self.visits.append(
                Visit(done.unit, done.backward, kernels, done.peak, self.alive, bounded, graded, *copies)
            )
            self.graded.clear()


class _FakeMover:
    """What `Inputs` has in a fake run in the place of copies: they are counted, and none is made."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter
        self._held = 0
        self.most = 0  # bytes on the host at once

    def down(self, tensor: torch.Tensor) -> tuple[int, None]:
        self._held += tensor.nbytes
        self.most = max(self.most, self._held)
        self._meter.open.copied += tensor.nbytes
        return tensor.nbytes, None

    def up(self, stored: int, like: Layout) -> tuple[torch.Tensor, None]:
        self._meter.open.copied += stored
        return like.empty(like.device), None

    def wait(self, event: None) -> None:
        self._meter.open.awaits = True

    def drop(self, stored: int) -> None:
        self._held -= stored

    def hold(self, nbytes: int) -> None:
        """Hear of bytes on the device, which the meter sees by itself."""


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel touches of `tensor`; an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def trace(
    model: nn.Module,
    units: Sequence[UnitParts],
    inputs: Mapping[str, Any],
    *,
    autocast: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    offload_inputs: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Trace:
    """Run `model`, whose parameters are on the meta device, forward and backward on fake tensors: Note [Fake run].

    `units` are in the runtime's order, the root last. `inputs` are keyword arguments of the model; tensors on the meta
    device. `loss` picks the tensor to start backward from; by default the output's `loss`, else the sum of its first
    tensor. With `activation_checkpointing` units are recomputed; with `offload_inputs` their inputs are on the host
    meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fakes = _materialise(model)
        units = [UnitParts(unit.modules, [fakes.get(id(p), p) for p in unit.watched]) for unit in units]
        arguments = {key: _on_cpu(value) for key, value in inputs.items()}
        meter = _Meter(units)
        given = (value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor))
        meter.ignore((*model.parameters(), *model.buffers(), *given))
        model.train()
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            # Without a cache transformers looks for packed sequences, and sees none of the values of fake tensors.
            config.use_cache = True
        mover = _FakeMover(meter)
        if activation_checkpointing:
            call = partial(Inputs(mover, FakeTensor).around, checkpoint) if offload_inputs else checkpoint
            modules = [module for unit in units for module in unit.modules]
            stack.enter_context(_recomputation(modules, autocast, call, by_position=recomputes_itself(model)))
        stack.enter_context(_boundaries(model, units, meter))
        stack.enter_context(_FlashAttention())
        stack.enter_context(meter)
        if autocast is not None:
            with CudaAutocast(autocast):
                output = model(**arguments)
            output = _as_accelerate_returns(output)
        else:
            output = model(**arguments)
        start = (loss or _loss_of)(output)
        del output  # as in a training loop, which keeps the loss alone
        meter.turn_to(meter.root, backward=True)
        if start.requires_grad:
            start.backward()
        meter.close()
        return Trace(tuple(meter.visits), mover.most)


def _materialise(model: nn.Module) -> dict[int, nn.Parameter]:
    """Give meta parameters and buffers fake storage on the CPU; return the new parameters by the id of the old ones.

    Tied parameters stay tied.
    """
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in fakes:
                    fake = torch.empty_like(parameter, device="cpu")
                    fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = fakes[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    return fakes


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, device="cpu").requires_grad_(value.requires_grad)


def _as_accelerate_returns(output: Any) -> Any:
    """Cast floating outputs to float32, as Accelerate's wrapper around a mixed-precision forward does."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.is_floating_point() else output
    if isinstance(output, Mapping):
        for key in list(output):
            output[key] = _as_accelerate_returns(output[key])  # type: ignore[index]
    return output


def _loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = next(value for value in tree_leaves(output) if isinstance(value, torch.Tensor) and value.requires_grad)
    return first.float().sum()


@contextmanager
def _boundaries(model: nn.Module, units: Sequence[UnitParts], meter: _Meter) -> Iterator[None]:
    """Tell the meter where each unit's forward and backward begin and end, and of parameters' gradients."""
    handles = []
    for index, unit in enumerate(units):
        for place, module in enumerate(unit.modules):
            handles.append(module.register_forward_pre_hook(_before(index, meter, place == 0), with_kwargs=True))
            handles.append(module.register_forward_hook(_after(index, meter)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(meter.fresh.append))
    for index, unit in enumerate(units[:-1]):
        waiting = [parameter for parameter in unit.watched if parameter.requires_grad]
        for parameter in waiting:
            handles.append(parameter.register_post_accumulate_grad_hook(_complete(index, meter, waiting)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _complete(index: int, meter: _Meter, parameters: Sequence[torch.Tensor]) -> Any:
    """Return a hook that notes a rooted unit once all of its parameters have a gradient."""
    seen: set[int] = set()

    def hook(parameter: torch.Tensor) -> None:
        seen.add(id(parameter))
        if len(seen) == len(parameters):
            meter.graded.append(index)

    return hook


@contextmanager
def _recomputation(
    modules: Sequence[nn.Module], autocast: torch.dtype | None, call: Callable[..., Any], *, by_position: bool
) -> Iterator[None]:
    """Let modules keep their inputs alone and compute again in backward, under the same casts.

    `call` is the checkpoint, which is given all tensors as the runtime's is, or with `by_position` those alone.
    """
    for module in modules:
        module.forward = _recomputed(module.forward, autocast, call, by_position)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _before(index: int, meter: _Meter, first: bool) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        meter.turn_to(index, backward=False)
        for value in tree_leaves((args, kwargs)):
            if first and isinstance(value, torch.Tensor) and value.requires_grad:
                meter.bounded.add(index)
                # The unit before hooked the same tensor as its output, and so is told first.
                value.register_hook(lambda _: _leave(index, meter))

    return hook


def _leave(index: int, meter: _Meter) -> None:
    if meter.open.backward and meter.open.unit == index:
        meter.turn_to(meter.root, backward=True)


def _after(index: int, meter: _Meter) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: meter.turn_to(index, backward=True))
        meter.turn_to(meter.root, backward=False)

    return hook


def _recomputed(forward: Any, autocast: torch.dtype | None, call: Callable[..., Any], by_position: bool) -> Any:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with _FlashAttention(), CudaAutocast(autocast) if autocast is not None else nullcontext():
            return forward(*args, **kwargs)  # in backward no other mode is on

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # As transformers' own layers do when they are recomputed, which would append to the cache a second time.
        args = tuple(None if is_cache(value) else value for value in args)
        kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
        if by_position:
            return call(partial(compute, **kwargs), *args, use_reentrant=False)
        return checkpointed(call, compute, *args, **kwargs)

    return wrapped
