"""How the runtime hears of a forward and a backward: hooks on modules, on outputs, and a boundary on inputs.

Note [Boundaries]
-----------------
* Outputs: a hook on each output tensor that needs a gradient fires before the first node of the unit runs in
  backward. A view's hook is lost when an in-place operation follows it, since that rewrites the view's history; the
  base's own node stays in the graph, so the base is hooked too.
* Inputs: the input tensors that need a gradient pass through one identity: a view, or a function where there are
  several. Its node is the first that the unit's forward made, and autograd runs the ready node that was made last, so
  when it runs, no node inside of the unit is left, also not on a path to inputs that hide in objects (a cache of keys
  and values). A unit without such inputs is finished at the end of backward.
* Inputs that the unit changes in place: the gradient leaves by the changed tensor's own history, past the identity.
  Then the node that made the input speaks for it: it is older than all nodes of the unit, so that none is left when it
  runs. (torch refuses such changes of what a function returned as it came; that mark is taken off.)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ourshard.runtime.casting import CastsAlone
from ourshard.runtime.compiling import outside_of_compile

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.unit import Call, Unit

    Inputs = tuple[torch.Tensor, ...]

_CreationMeta = torch._C._autograd.CreationMeta  # type: ignore[attr-defined]
_allow_writes = torch._C._autograd._set_creation_meta  # type: ignore[attr-defined]
_BARE = frozenset({type(None), bool, int, float, str})  # types of most arguments that hold no tensor
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, nn.Module)


def visit_tensors(value: Any, visit: Callable[[torch.Tensor], None], depth: int = 4) -> None:
    """Call `visit` on every tensor in containers, dataclasses and objects, at most `depth` objects deep."""
    if isinstance(value, torch.Tensor):
        visit(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            visit_tensors(item, visit, depth)
    elif isinstance(value, dict):
        for item in value.values():
            visit_tensors(item, visit, depth)
    elif depth and not isinstance(value, _PLAIN) and not callable(value):
        for item in _attributes(value):
            visit_tensors(item, visit, depth - 1)


def _attributes(value: Any) -> list[Any]:
    names = list(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names += [f.name for f in dataclasses.fields(value) if f.name not in names]
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [getattr(value, name, None) for name in names]


def collect_inputs(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Add the tensors that need a gradient, from plain containers too."""
    for value in values:
        kind = type(value)
        if kind is tuple or kind is list:
            collect_inputs(value, found)
        elif kind is dict:
            collect_inputs(value.values(), found)
        elif kind not in _BARE and isinstance(value, torch.Tensor) and value.requires_grad:
            found.append(value)


def replace_inputs(value: Any, fresh: dict[int, torch.Tensor]) -> Any:
    """Return `value` with each tensor of `fresh` (by id of the old one) in place of the old.

    Lists and dicts stay the same objects: a forward may add to the one it was given.
    """
    if isinstance(value, torch.Tensor):
        return fresh.get(id(value), value)
    if type(value) is tuple:
        return tuple(replace_inputs(item, fresh) for item in value)
    if type(value) in (list, dict):
        for key, item in list(enumerate(value) if type(value) is list else value.items()):
            replaced = replace_inputs(item, fresh)
            if replaced is not item:
                value[key] = replaced
    return value


class _InputBoundary(torch.autograd.Function):
    """Identity whose backward says that the unit's backward is over: Note [Boundaries]."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.call = unit, call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.unit.after_backward(ctx.call)
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, unit: None, call: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


def refuse_transforms(engine: Engine) -> None:
    """Refuse a forward inside of `torch.func.vmap`, `grad` or `jvp`, where parameters can't be gathered."""
    if torch._C._functorch.maybe_current_level() is None or engine.gathered_depth:
        return
    if not any(unit.sharded for unit in engine.units):
        return
    raise RuntimeError(
        "A sharded model can't be called inside of `torch.func` transforms (vmap, grad, jvp, ...): they need whole "
        "parameters. On all ranks, use `with ourshard.gathered(model):` around the transform."
    )


class Entry:
    """A forward with gradient that is under way, and what its inputs became: Note [Boundaries]."""

    __slots__ = ("_made", "_nodes", "_unit", "call", "inputs")

    def __init__(self, unit: Unit, call: Call, inputs: Sequence[torch.Tensor]) -> None:
        self._unit, self.call = unit, call
        self.inputs: Inputs = ()
        self._nodes: list[Any] = []  # of the identities
        self._made = [(tensor if tensor._base is None else tensor._base).grad_fn for tensor in inputs]
        if len(inputs) == 1 and inputs[0].layout is torch.strided:
            self.inputs = (inputs[0].view_as(inputs[0]),)
            self._nodes = [self.inputs[0].grad_fn]
            self._nodes[0].register_prehook(partial(_leave, unit, call))
        elif inputs:
            self.inputs = _InputBoundary.apply(unit, call, *inputs)
            for tensor in self.inputs:
                _allow_writes(tensor, _CreationMeta.DEFAULT)
            self._nodes = [tensor.grad_fn for tensor in self.inputs]

    def close(self) -> Call:
        """Return the call once its forward is over; first look for inputs that were changed in place."""
        for tensor, node in zip(self.inputs, self._nodes, strict=True):
            if tensor.grad_fn is node:
                return self.call
        for node in self._made if self.inputs else ():
            if node is not None:
                node.register_prehook(partial(_leave_once, self._unit, self.call))
        return self.call


def _leave(unit: Unit, call: Call, *_: Any) -> None:
    unit.after_backward(call)


def _leave_once(unit: Unit, call: Call, *_: Any) -> None:
    if unit.running:
        unit.after_backward(call)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return what `visit_tensors` visits."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    visit_tensors(value, found.append)
    return found


def hook_outputs(outputs: Iterable[torch.Tensor], before_backward: Callable[..., None]) -> bool:
    """Call `before_backward` when a gradient reaches any of `outputs`; return whether one can."""
    hooked = False
    for tensor in outputs:
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(before_backward)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                base.register_hook(before_backward)
            hooked = True
    return hooked


def forward_on_stack(modules: Collection[nn.Module]) -> bool:
    """Say whether the caller runs inside of the forward of one of `modules`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in modules:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_LOOKS = 3  # forwards with gradient in which a unit's modules are searched for results that they keep


def _has_graph(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in values)


class HiddenResults:
    """Results of a module that it does not return: outputs too, since gradients enter by them.

    Some are kept in attributes (the auxiliary loss of a router, say), some put into its arguments (into a list, or an
    object). Whether there are any is looked up in the first forwards with gradient alone.
    """

    __slots__ = ("_fills", "_forwards", "_given", "_keepers", "expected")

    def __init__(self) -> None:
        self.expected = True  # else a forward need not ask
        self._forwards = 0
        self._keepers: dict[tuple[nn.Module, str], None] = {}
        self._fills = False  # it puts results into its arguments
        self._given: list[torch.Tensor] = []  # what was in these before, while a forward runs

    def before(self, values: Any, inputs: Iterable[torch.Tensor] = ()) -> None:
        """Note what is in the arguments of a forward that begins; `inputs` take the places of some."""
        if self._forwards < _LOOKS or self._fills:
            self._given = [*tensors_in(values), *inputs]

    def after(self, module: nn.Module, values: Any) -> list[torch.Tensor]:
        """Return the results that the forward has hidden."""
        looks = self._forwards < _LOOKS
        self._forwards += looks
        found = [*self._filled_in(values, looks), *tensors_in(self._kept(module, looks))]
        self.expected = self._forwards < _LOOKS or self._fills or bool(self._keepers)
        return found

    def _filled_in(self, values: Any, looks: bool) -> list[torch.Tensor]:
        if not looks and not self._fills:
            return []
        before, self._given = {id(tensor) for tensor in self._given}, []
        found = [tensor for tensor in tensors_in(values) if tensor.grad_fn is not None and id(tensor) not in before]
        self._fills |= bool(found)
        return found

    def _kept(self, module: nn.Module, looks: bool) -> list[Any]:
        for inner in module.modules() if looks else ():
            names = [name for name, value in vars(inner).items() if _has_graph(value)]
            self._keepers |= {(inner, name): None for name in names}
        return [getattr(inner, name, None) for inner, name in self._keepers]


class UnitHooks:
    """The forward hooks of one module of one unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._casts = CastsAlone(unit.engine)
        self._hidden = HiddenResults()

    def attach(self, module: nn.Module) -> None:
        before, after = outside_of_compile(self.before_forward), outside_of_compile(self.after_forward)
        handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._unit.engine.own_hooks |= {handle.id, module.register_forward_hook(after, with_kwargs=True).id}

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._unit.engine
        outside = engine.casts.alone and (engine.forward_depth == 0 or engine.phase_is_backward)
        given = self._casts.begin(module, args, kwargs) if outside else None
        if engine.gathered_depth:
            return given
        if not engine.forward_has_grad:
            engine.read_sync(self._unit)
            if self._is_alone():
                engine.open_door((engine.root,))
        return self._enter(*given or (args, kwargs)) or given

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the unit whole, and return its arguments with their boundary, or None for as they are."""
        unit = self._unit
        engine = unit.engine
        recomputing = unit.running
        unit.before_forward()
        if not torch.is_grad_enabled():
            if engine.forward_has_grad:
                unit.recomputes += 1  # a reentrant checkpoint: this forward comes again, with gradient
            return None
        if recomputing:
            return None
        found: list[torch.Tensor] = []
        collect_inputs(args, found)
        collect_inputs(kwargs.values(), found)
        entry = unit.enter(found)
        if self._hidden.expected:
            self._hidden.before((args, kwargs), entry.inputs)
        if not found:
            return None  # no boundary: the call counts as open until the end of its backward
        if len(found) == 1 and args and args[0] is found[0]:
            return (entry.inputs[0], *args[1:]), kwargs
        renamed = {id(old): new for old, new in zip(found, entry.inputs, strict=True)}
        return replace_inputs(args, renamed), replace_inputs(kwargs, renamed)

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        unit = self._unit
        if unit.engine.gathered_depth:
            unit.engine.watch_gathered(outputs)
            return
        has_backward = False
        tensors = tensors_in(outputs)
        if unit.engine.output_watch is not None:
            unit.engine.output_watch(unit, tensors)
        if unit.sharded:
            unit.hold_if_given_away(tensors)
        if torch.is_grad_enabled() and not unit.running:
            if self._hidden.expected:
                tensors += self._hidden.after(module, (args, kwargs))
            has_backward = hook_outputs(tensors, partial(unit.on_output_gradient, unit.entered.pop().close()))
            if not has_backward and unit.trainable:
                unit.engine.hold(unit)  # it may have put its result where nobody looks: into an argument, say
        unit.after_forward(has_backward)
        if not unit.engine.forward_has_grad and self._is_alone():
            unit.engine.close_door((unit.engine.root,), outputs)

    def _is_alone(self) -> bool:
        """Say whether the module is called on its own and needs leaves of the root, which are not in their places."""
        return self._unit.engine.outside_of_forward and any(not lane.direct for lane in self._unit.guests)


class RootHooks:
    """The forward hooks of the root module: they open and close the forward phase."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hidden = HiddenResults()

    def attach(self, module: nn.Module) -> None:
        before, after = outside_of_compile(self.before_forward), outside_of_compile(self.after_forward)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_transforms(self._engine)
        given = self._engine.begin_forward(args, kwargs)
        if torch.is_grad_enabled() and self._hidden.expected:
            self._hidden.before((args, kwargs) if given is None else given)
        return given

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if outputs is None and sys.exc_info()[0] is not None:  # called although the forward raised
            self._engine.forward_failed()
            return None
        asks = torch.is_grad_enabled() and self._hidden.expected
        hidden = self._hidden.after(module, (args, kwargs)) if asks else []
        return self._engine.end_forward(outputs, hidden)


class DoorHooks:
    """Hooks on a module outside of all units that owns root parameters, for calls that do not come through the root."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._casts = CastsAlone(engine)

    def attach(self, module: nn.Module) -> None:
        before, after = outside_of_compile(self.before_forward), outside_of_compile(self.after_forward)
        handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._engine.own_hooks |= {handle.id, module.register_forward_hook(after).id}

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._engine.outside_of_forward:
            self._engine.read_sync()
            self._engine.open_door(self._engine.rooted)
        return self._casts.begin(module, args, kwargs) if self._engine.casts.alone else None

    def after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._engine.outside_of_forward:
            self._engine.close_door(self._engine.rooted, outputs)
        elif self._engine.gathered_depth:
            self._engine.watch_gathered(outputs)
