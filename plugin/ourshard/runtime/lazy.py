"""Parameters that have values but no memory yet.

Note [Lazy tensors]
-------------------
A lazy tensor shows shape, strides, dtype and device (the CPU) like any other, and knows a source (`source.py`) of its
values. `shard_model` reads this rank's rows of it and no others. Until then:
* questions, casts, views, joins, clones and deep copies are lazy again;
* in-place initialisation (`normal_`, `zero_`, `copy_` of a lazy tensor, ...) is noted with the state of the random
  numbers, which move on as they would have;
* whatever else a program does with it is right, too: the tensor is read whole for that call. It becomes an ordinary
  tensor, in memory for good, when the call changes it, keeps a view of it, records a gradient, or comes often.
Tensors that share memory (`p`, `p.data`, `p[0]`) share one `_Cell`, so that they change together.
Underneath is a tensor on the meta device: what gets past `__torch_function__` fails in torch, it does not read zeros.
One such way is `ordinary.data = lazy`, which torch does not announce; `ordinary.copy_(lazy)` works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ourshard.runtime.handle import GET_DATA, METADATA, SET_DATA
from ourshard.runtime.identity import take_content
from ourshard.runtime.source import Cast, Computed, Constant, Drawn, Joined, Reshaped, Sliced, Source, scratch

_T = torch.Tensor
KEEP_AFTER = 3  # calls that read a tensor whole before it stays in memory

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class _Cell:
    """What tensors that share memory have in common: a source, or the memory once there is one."""

    __slots__ = ("real", "source", "used")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.real: torch.Tensor | None = None
        self.used = 0


View = Callable[[torch.Tensor], torch.Tensor]  # makes a view of the whole tensor of its cell


class LazyTensor(torch.Tensor):
    """A tensor or parameter of Note [Lazy tensors]. Made by `lazy`."""

    _cell: _Cell
    _view: View | None

    @property
    def source(self) -> Source:
        """Return where the values are."""
        return self._cell.source if self._view is None else _source_of_view(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA and func not in _HANDLERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = _lazies(args, kwargs)
        late = [tensor for tensor in found if tensor._cell.real is not None]
        for tensor in late:
            _become_real(tensor)
        if late:
            return func(*args, **kwargs)
        func = _INIT.get(getattr(func, "__name__", ""), func)
        handler = _HANDLERS.get(func)
        result = handler(func, args, kwargs) if handler is not None else NotImplemented
        return _compute(func, found, args, kwargs) if result is NotImplemented else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = _make(_Cell(self.source), None) if self._cell.real is None else copy.deepcopy(materialize(self), memo)
        twin.requires_grad_(self.requires_grad)
        own = {key: value for key, value in self.__dict__.items() if key not in ("_cell", "_view")}
        twin.__dict__.update(copy.deepcopy(own, memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialize(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"


def lazy(source: Source) -> LazyTensor:
    """Return a tensor with the values of `source` and no memory."""
    return _make(_Cell(source), None)


def source_of(tensor: torch.Tensor) -> Source | None:
    """Return where the values of a lazy tensor are; None for a tensor that is in memory."""
    return tensor.source if isinstance(tensor, LazyTensor) and tensor._cell.real is None else None


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Turn a lazy tensor into an ordinary one, in place, and return it; others are returned as they are."""
    if isinstance(tensor, LazyTensor):
        with torch._C.DisableTorchFunction():  # inside of `init_context` reading would make lazy tensors again
            if tensor._cell.real is None:
                tensor._cell.real = tensor._cell.source.whole()
            _become_real(tensor)
    return tensor


def give_up_values(tensor: torch.Tensor) -> None:
    """Turn a lazy parameter into one on the meta device, in place; its owner has read the values."""
    if isinstance(tensor, LazyTensor):
        _forget(tensor)


def _make(cell: _Cell, view: View | None, meta: torch.Tensor | None = None) -> LazyTensor:
    shape, dtype = cell.source.shape, cell.source.dtype
    plain = torch.empty(shape, dtype=dtype, device="meta") if meta is None else meta
    found = torch.Tensor._make_subclass(LazyTensor, plain)
    assert isinstance(found, LazyTensor)
    found._cell, found._view = cell, view
    return found


def _forget(tensor: LazyTensor) -> None:
    """Leave the class of lazy tensors; what stays is on the meta device."""
    is_parameter = tensor.__dict__.pop("_is_param", False)
    del tensor._cell, tensor._view
    tensor.__class__ = nn.Parameter if is_parameter else torch.Tensor  # type: ignore[assignment]


def _become_real(tensor: LazyTensor) -> None:
    real = tensor._cell.real
    assert real is not None
    _become(tensor, real if tensor._view is None else tensor._view(real))


def _become(tensor: LazyTensor, value: torch.Tensor) -> None:
    """Make `tensor` an ordinary tensor (or parameter) of that value, keeping its identity and attributes."""
    requires_grad = tensor.requires_grad
    _forget(tensor)
    twin = torch.Tensor._make_subclass(type(tensor), value.detach(), requires_grad)
    twin.__dict__.update(tensor.__dict__)
    take_content(tensor, twin)


def _lazies(args: Args, kwargs: Kwargs) -> list[LazyTensor]:
    return list({id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, LazyTensor)}.values())


# ---- calls that read -----------------------------------------------------------------------------------------


def _compute(func: Any, found: list[LazyTensor], args: Args, kwargs: Kwargs) -> Any:
    """Call `func` with whole tensors, and keep those in memory that the call ties down."""
    kept = [tensor for tensor in found if _must_stay(func, tensor)]
    if kept or len({id(tensor._cell) for tensor in found}) < len(found):
        return _call_in_memory(func, kept or found, args, kwargs)
    wholes = {id(tensor): tensor.source.whole() for tensor in found}
    versions = {key: whole._version for key, whole in wholes.items()}
    given, named = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, kwargs))
    result = func(*given, **named)
    written = {key for key, whole in wholes.items() if whole._version != versions[key]}
    if not written and (shared := [tensor for tensor in found if _shares(result, wholes[id(tensor)])]):
        return _call_in_memory(func, shared, args, kwargs)  # what it returns has to be a view of the tensor itself
    for tensor in found:
        tensor._cell.used += 1
        if id(tensor) in written:
            with torch.no_grad():
                materialize(tensor).copy_(wholes[id(tensor)])
    back = {id(wholes[id(tensor)]): tensor for tensor in found}
    return tree_map(lambda leaf: back.get(id(leaf), leaf), result)


def _call_in_memory(func: Any, tensors: list[LazyTensor], args: Args, kwargs: Kwargs) -> Any:
    for tensor in tensors:
        materialize(tensor)
    return func(*args, **kwargs)


def _must_stay(func: Any, tensor: LazyTensor) -> bool:
    records = tensor.requires_grad and torch.is_grad_enabled()
    exposes = getattr(func, "__name__", "") in _EXPOSING
    return records or exposes or tensor._cell.used >= KEEP_AFTER


def _shares(result: Any, whole: torch.Tensor) -> bool:
    start = whole.untyped_storage().data_ptr()
    return any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() == start for t in tree_leaves(result))


# These hand out memory that torch can't watch, or take it from elsewhere.
_EXPOSING = {"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "set_"}
_EXPOSING |= {"resize_", "__dlpack__", "_make_subclass", "__reduce_ex__", "swap_tensors", "register_hook"}
_EXPOSING |= {"register_post_accumulate_grad_hook", "pin_memory"}


# ---- calls that stay lazy ------------------------------------------------------------------------------------


def _alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _alias_of(args[0])


def _alias_of(tensor: LazyTensor) -> LazyTensor:
    with torch._C.DisableTorchFunctionSubclass():
        return _make(tensor._cell, tensor._view, torch.Tensor.detach(tensor))


def _set_data(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, value = args
    if not isinstance(value, LazyTensor):
        _become(tensor, value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        SET_DATA(tensor, torch.Tensor.detach(value))
    tensor._cell, tensor._view = value._cell, value._view


def _clone(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return lazy(args[0].source)


def _contiguous(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args[0].is_contiguous() else lazy(args[0].source)


def _cast(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    if not isinstance(tensor, LazyTensor) or (tensor.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    like = func(torch.empty((), dtype=tensor.dtype, device="cpu"), *args[1:], **kwargs)
    if not isinstance(like, torch.Tensor) or like.device.type != "cpu":
        return NotImplemented
    if like.dtype == tensor.dtype:
        return lazy(tensor.source) if kwargs.get("copy") else tensor
    return lazy(Cast(tensor.source, like.dtype))


def _viewed(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return lazy views, if what `func` returns are views."""
    tensor, *rest = args
    if not isinstance(tensor, LazyTensor) or _lazies(tuple(rest), kwargs):
        return NotImplemented
    if func is _T.__getitem__ and rest[0] is Ellipsis:
        return tensor
    whole = torch.empty(tensor._cell.source.shape, dtype=tensor.dtype, device="meta")
    before: View = tensor._view or _itself
    made = func(before(whole), *rest, **kwargs)
    if isinstance(made, torch.Tensor):
        return _one_view(tensor, lambda given: func(before(given), *rest, **kwargs), made, whole)
    views = [
        _one_view(tensor, lambda given, n=n: func(before(given), *rest, **kwargs)[n], meta, whole)  # type: ignore[misc]
        for n, meta in enumerate(made)
    ]
    return NotImplemented if any(view is NotImplemented for view in views) else type(made)(views)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _one_view(tensor: LazyTensor, of: View, meta: torch.Tensor, whole: torch.Tensor) -> Any:
    return _make(tensor._cell, of, meta) if meta is whole or meta._base is whole else NotImplemented


def _source_of_view(tensor: LazyTensor) -> Source:
    """Return a source that reads no more than the view, where the view is a block or a run of blocks."""
    assert tensor._view is not None
    whole, first = tensor._cell.source, int(tensor.storage_offset())
    if tensor.is_contiguous():
        flat = Reshaped(whole, (whole.numel,))
        return Reshaped(Sliced(flat, 0, first, first + tensor.numel()), tensor.shape)
    if tensor.dim() == len(whole.shape) and tensor.stride() == _strides(whole.shape):
        cut = [dim for dim, extent in enumerate(whole.shape) if extent != tensor.shape[dim]]
        if len(cut) == 1:
            start = int(first) // int(tensor.stride(cut[0]))
            return Sliced(whole, cut[0], start, start + int(tensor.shape[cut[0]]))
    return Computed(tensor._view, [whole], tensor.shape, whole.dtype)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors, *rest = args
    dim = rest[0] if rest else kwargs.get("dim", 0)
    if not all(isinstance(t, LazyTensor) for t in tensors) or len({t.dtype for t in tensors}) > 1 or "out" in kwargs:
        return NotImplemented
    parts: list[Source] = [tensor.source for tensor in tensors]
    if func is torch.stack:
        rank = len(parts[0].shape) + 1
        dim %= rank
        parts = [Reshaped(part, (*part.shape[:dim], 1, *part.shape[dim:])) for part in parts]
    return lazy(Joined(parts, dim % len(parts[0].shape)))


def _answer(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _takes_data(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Answer `torch._has_compatible_shallow_copy_type`: whether `args[0].data = args[1]` works."""
    return isinstance(args[0], LazyTensor)


def _like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make a new tensor that takes shape, dtype and device from a lazy one, but no values."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")  # takes no memory before it is written
        return func(plain, *args[1:], **kwargs)


def _hash(func: Any, args: Args, kwargs: Kwargs) -> int:
    return id(args[0])


# ---- writing in place ----------------------------------------------------------------------------------------


def _written(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Note an in-place call whose other arguments are plain values; let random numbers move on."""
    tensor, *rest = args or (kwargs["tensor"],)  # `nn.init` hands its tensor on by name
    if not isinstance(tensor, LazyTensor) or kwargs.get("generator") is not None:
        return NotImplemented
    given = {"a": "from", "b": "to"} if func is _T.uniform_ else {}  # as `nn.init` and as the method call them
    kwargs = {given.get(key, key): value for key, value in kwargs.items() if key not in ("tensor", "generator")}
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((rest, kwargs))):
        return NotImplemented
    cell, view = tensor._cell, tensor._view
    state = torch.get_rng_state()
    if func in _DRAWING:
        with torch.no_grad():
            func(scratch(tensor.shape, tensor.dtype), *rest, **kwargs)
    overwrites = view is None and (func in _DRAWING or func in _FILLING)
    before = Constant(0, cell.source.shape, cell.source.dtype) if overwrites else cell.source

    def again(whole: torch.Tensor) -> None:
        func(whole if view is None else view(whole), *rest, **kwargs)

    cell.source = Drawn(before, again, state if func in _DRAWING else None)
    return tensor


def _copied(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, value = args[:2]
    if not isinstance(tensor, LazyTensor) or tensor._view is not None or value.shape != tensor.shape:
        return NotImplemented
    if isinstance(value, LazyTensor):
        tensor._cell.source = value.source if value.dtype == tensor.dtype else Cast(value.source, tensor.dtype)
        return tensor
    tensor._cell.real = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(value.detach())
    _become_real(tensor)
    return tensor


def _methods(names: str) -> set[Any]:
    return {getattr(_T, name) for name in names.split() if hasattr(_T, name)}


# What `nn.init` announces to tensor subclasses. It looks the functions up by name when it does, and may find those that
# a library has put in their place (transformers does, for the time of an initialisation).
_INIT = {name: getattr(nn.init, name) for name in ("kaiming_normal_", "kaiming_uniform_", "constant_")}
_INIT |= {"normal_": _T.normal_, "uniform_": _T.uniform_}

_DRAWING = _methods("normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ bernoulli_")
_DRAWING |= {nn.init.kaiming_normal_, nn.init.kaiming_uniform_}
_FILLING = _methods("zero_ fill_") | {nn.init.constant_}
_CHANGING = _methods("add_ sub_ mul_ div_ clamp_ clamp_min_ clamp_max_ erfinv_ neg_ pow_ sqrt_ abs_ exp_ log_ tanh_")
_VIEWS = _methods(
    "view view_as reshape t transpose swapaxes permute movedim unsqueeze squeeze flatten select narrow expand "
    "__getitem__ chunk split unbind tensor_split unflatten"
)
_VIEWS |= {torch.reshape, torch.t, torch.transpose, torch.swapaxes, torch.permute, torch.movedim, torch.unsqueeze}
_VIEWS |= {torch.squeeze, torch.flatten, torch.select, torch.narrow, torch.chunk, torch.split, torch.unbind}
_VIEWS |= {_T.T.__get__, _T.mT.__get__, torch.tensor_split}  # type: ignore[attr-defined]
_LIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
_LIKE |= _methods("new_empty new_zeros new_ones new_full new_tensor")

_GET_GRAD, _SET_GRAD = _T.grad.__get__, _T.grad.__set__  # type: ignore[attr-defined, union-attr]

_HANDLERS: dict[Any, Callable[[Any, Args, Kwargs], Any]] = {
    **dict.fromkeys((_T.detach, GET_DATA), _alias),
    **dict.fromkeys((_T.clone, torch.clone), _clone),
    **dict.fromkeys((_T.to, _T.float, _T.half, _T.bfloat16, _T.double, _T.cpu, _T.type), _cast),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), _joined),
    **dict.fromkeys(_LIKE, _like),
    **dict.fromkeys(_DRAWING | _FILLING | _CHANGING, _written),
    **dict.fromkeys((_T.stride, _T.is_contiguous, _T.storage_offset, _GET_GRAD, _SET_GRAD), _answer),
    _T.device.__get__: lambda *_: torch.device("cpu"),  # type: ignore[attr-defined]
    _T.is_cpu.__get__: lambda *_: True,  # type: ignore[attr-defined]
    _T.is_meta.__get__: lambda *_: False,  # type: ignore[attr-defined]
    _T.get_device: lambda *_: -1,
    torch._has_compatible_shallow_copy_type: _takes_data,
    _T.copy_: _copied,
    _T.contiguous: _contiguous,
    _T.__hash__: _hash,
    SET_DATA: _set_data,
}
