"""What a parameter looks like while it is not whole on this rank.

Note [Handles]
--------------
When a model is sharded, the `nn.Parameter` objects that the user, the optimizer, PEFT and ties already hold become
handles: the same Python object, its class set to `ShardParameter`. A handle shows the logical shape, dtype, device
and `requires_grad`, and owns no data of that size: its storage is one element, expanded. While a unit computes, the
modules hold ordinary parameters (`leaves`) in place of the handles, so nothing in a forward pays for this.

Every torch function that meets a handle goes through `__torch_function__`:
* questions about shape, dtype, device and flags are answered;
* inside a forward of its model (a weight of one module read by another), the unit is gathered and the leaf takes the
  handle's place, with gradient;
* inside `gathered(writeback=True)` it does so too, for reads and writes: the block's end takes what leaves have, and so
  would undo a write to the master;
* anything else raises and says what to do. A handle never computes with its one element.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ourshard.runtime.identity import take_content
from ourshard.runtime.surgery import in_surgery

if TYPE_CHECKING:
    from ourshard.runtime.lane import Lane

_T = torch.Tensor

# Answered from the handle itself: they read or set flags, never data.
_FLAGS = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized
    is_nested names itemsize nbytes retains_grad output_nr _version _backward_hooks _post_accumulate_grad_hooks
    is_mps is_xpu is_xla is_ipu is_maia is_vulkan is_mkldnn is_sparse_csr is_mtia is_hpu volatile
"""
_QUESTIONS = """
    size dim numel nelement element_size is_floating_point is_complex is_signed requires_grad_ __len__ get_device
    is_inference ndimension is_shared _is_view _is_zerotensor is_conj is_neg
"""
METADATA: set[Any] = {getattr(_T, name).__get__ for name in _FLAGS.split() if hasattr(_T, name)}
METADATA |= {getattr(_T, name) for name in _QUESTIONS.split() if hasattr(_T, name)}
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_inference}
METADATA |= {torch.is_conj, torch.is_neg, torch._has_compatible_shallow_copy_type}
METADATA |= {_T.requires_grad.__set__}  # type: ignore[attr-defined]

# These return a handle of another dtype (or the same): `model.to(dtype)` on a sharded model.
_CASTS = {_T.to, _T.float, _T.half, _T.bfloat16, _T.double, _T.cpu, _T.cuda, _T.type}

# These ask for the gradient by a parameter: the leaf is what the graph knows, whole or not.
_BACKWARDS = {torch.autograd.grad, torch.autograd.backward, _T.backward}

# These make a new tensor, and ask for shape, dtype and device alone.
_LIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
_LIKE |= {torch.rand_like, torch.randn_like, torch.randint_like}
_LIKE |= {_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor}

GET_DATA, SET_DATA = _T.data.__get__, _T.data.__set__  # type: ignore[attr-defined]
GET_GRAD, SET_GRAD = _T.grad.__get__, _T.grad.__set__  # type: ignore[union-attr]

_SAVING = {"__reduce_ex__", "__deepcopy__", "data_ptr", "untyped_storage", "storage", "numpy", "tolist", "__array__"}


class Resting:
    """Behaviour shared by parameters and gradients whose data is not whole here."""

    _lane: Lane
    _position: int

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's rows, a view; possibly none."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handle = _first_handle(args, kwargs)
        if func in _LIKE:
            return handle._new_like(func, args, kwargs)
        return handle._called(func, args, kwargs)

    def _new_like(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a new tensor of which only the shape, dtype and device come from this one."""
        with torch._C.DisableTorchFunctionSubclass():
            outline = torch.empty(tuple(self.shape), dtype=self.dtype, device="meta")  # type: ignore[attr-defined]
            kwargs = {"device": self.device, **kwargs}  # type: ignore[attr-defined]
            return func(outline, *args[1:], **kwargs)

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RuntimeError(self._advice(getattr(func, "__name__", str(func))))

    def _advice(self, verb: str) -> str:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self._advice("pickling"))

    def __format__(self, spec: str) -> str:
        return repr(self)


def _first_handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Resting):
            return leaf
    raise AssertionError("a torch function met a handle that is not among its arguments")


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `shape` over one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class ShardParameter(Resting, nn.Parameter):
    """A parameter at rest: Note [Handles]. Made from an existing parameter by `become_handle`."""

    _heard = False  # a hook of the user that runs after its gradient has arrived has it

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's rows of the master, a view of shape (rows, ...); (0, ...) where this rank has none."""
        return self._lane.local_rows(self._position)

    @property
    def row_range(self) -> tuple[int, int]:
        """Rows [start, stop) of the first dimension that is longer than 1, which this rank holds."""
        rows = self._lane.rows(self._position)
        return rows.start, rows.stop

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """Return a handle of the gradient, or None when there is none; in a hook what this rank has got so far."""
        return GET_GRAD(self.leaf) if self._heard else self._lane.gradient_handle(self._position)

    @grad.setter
    def grad(self, value: Any) -> None:
        if self._heard:
            SET_GRAD(self.leaf, value)
            return
        own = isinstance(value, ShardGradient) and (value._lane, value._position) == (self._lane, self._position)
        if own:
            return  # as `p.grad *= 2` ends
        if value is not None:
            raise RuntimeError(
                f"The gradient of {self._lane.name_of(self._position)!r} is sharded and can't be replaced by a "
                "tensor; set it to None, or change it through optimizer.param_groups."
            )
        self._lane.drop_gradients((self._position,))

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._lane.unit.open_writes or func in _OF_THE_HANDLE:
            return self._called_at_rest(func, args, kwargs)
        result = func(*tree_map(_open_leaf_of, args), **tree_map(_open_leaf_of, kwargs))
        return self if result is self.leaf else result  # as of a write in place

    def _called_at_rest(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args and "tensor" in kwargs:  # as `nn.init` hands its tensor on
            args, kwargs = (kwargs["tensor"],), {key: value for key, value in kwargs.items() if key != "tensor"}
        answer = _ANSWERS.get(func)
        is_first = bool(args) and args[0] is self  # else another tensor takes values of this one
        if answer is not None and is_first:
            return answer(self, *args[1:], **kwargs)
        if func in _CASTS:
            return self._cast(func, args, kwargs)
        if func in _ROW_BY_ROW and is_first:
            return self._change_rows(func, args, kwargs)
        if func in _LISTS and any(isinstance(target, ShardParameter) for target in args[0]):
            return self._change_lists(func, args, kwargs)
        if func in _BACKWARDS:
            return func(*tree_map(_leaf_of, args), **tree_map(_leaf_of, kwargs))
        name = getattr(func, "__name__", "")
        if name in _SAVING:
            raise RuntimeError(self._advice(name))
        return self._compute(func, args, kwargs)

    def _stride(self, dim: int | None = None) -> Any:
        strides = _strides(self.shape)
        return strides if dim is None else strides[dim]

    @property
    def leaf(self) -> nn.Parameter:
        """Return the parameter that computes in place of this one; its data is there only while its unit is whole."""
        return self._lane.leaves[self._position]

    def _compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        written = (*args[:1], kwargs.get("out")) if writes(name, kwargs) else ()
        if any(isinstance(target, Resting) for target in tree_leaves(written)):
            raise RuntimeError(self._advice(f"writing with {name!r}"))

        units = set()

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, ShardParameter):
                return leaf
            unit = leaf._lane.unit
            found = unit.whole_on_access(leaf._lane, leaf._position)
            if found is None:
                raise RuntimeError(leaf._advice(f"computing with {name!r}"))
            units.add(unit)
            return found if leaf.requires_grad else found.detach()  # as it is of `.data` and `.detach()`

        args, kwargs = tree_map(whole, (args, kwargs))
        result = func(*args, **kwargs)
        if torch.is_grad_enabled():
            for unit in units:
                unit.watch(result)
        return result

    def _cast(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            like = func(torch.empty((), dtype=self.dtype, device=self.device), *args[1:], **kwargs)
        if not isinstance(like, torch.Tensor):
            return like
        engine = self._lane.unit.engine
        if not engine.gathered_depth and engine.may_gather():
            return self._compute(func, args, kwargs)
        if like.device != self.device:
            raise RuntimeError(
                f"{self._lane.name_of(self._position)!r} is sharded on {self.device} and can't move to "
                f"{like.device}. Take `ourshard.full_state_dict(model)`, or save and load the model without ourshard."
            )
        if like.dtype == self.dtype:
            return self
        with torch._C.DisableTorchFunctionSubclass():
            needs_grad = self.requires_grad and (like.is_floating_point() or like.is_complex())
            twin = nn.Parameter(placeholder(tuple(self.shape), like.dtype, self.device), requires_grad=needs_grad)
        twin.__class__ = ShardParameter
        twin._lane, twin._position = self._lane, self._position  # type: ignore[attr-defined]
        return twin

    def _copy(self, value: torch.Tensor, non_blocking: bool = False) -> Any:
        """Take this rank's rows of a whole value, the same on every rank: `writing.py`."""
        from ourshard.runtime.writing import write_whole, written

        if isinstance(value, ShardParameter):
            self.local.copy_(self._same_rows(value))
        elif tuple(value.shape) == tuple(self.shape):
            write_whole(self._lane, self._position, value)
        else:
            raise RuntimeError(self._advice(f"copying a value of shape {tuple(value.shape)} into it"))
        written(self._lane)
        return self

    def _change_rows(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change this rank's rows in place, by numbers and by parameters that are sharded alike."""
        from ourshard.runtime.writing import written

        args, kwargs = tree_map(lambda leaf: self._same_rows(leaf) if torch.is_tensor(leaf) else leaf, (args, kwargs))
        with torch.no_grad():
            func(*args, **kwargs)
        written(self._lane)
        return self

    @staticmethod
    def _change_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change this rank's rows of each parameter in a list, as `_change_rows` those of one."""
        from ourshard.runtime.writing import written

        targets = args[0]

        def rows(own: Any, value: Any) -> Any:
            return own._same_rows(value) if isinstance(own, ShardParameter) and torch.is_tensor(value) else value

        local = [own.local if isinstance(own, ShardParameter) else own for own in targets]
        others = [list(map(rows, targets, arg)) if isinstance(arg, (list, tuple)) else arg for arg in args[1:]]
        with torch.no_grad():
            func(local, *others, **kwargs)
        for lane in {own._lane for own in targets if isinstance(own, ShardParameter)}:
            written(lane)

    def _same_rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of `value` that this rank holds of this parameter."""
        if not isinstance(value, ShardParameter):
            if value.dim() == 0:
                return value
            raise RuntimeError(self._advice("changing it by a whole tensor"))
        mine, theirs = self._lane, value._lane
        same = (mine.layout.tensors, mine.layout.shard_numel) == (theirs.layout.tensors, theirs.layout.shard_numel)
        if not same or value._position != self._position:
            raise RuntimeError(value._advice(f"combining it with {mine.name_of(self._position)!r}, cut otherwise,"))
        return value.local

    def _detached(self) -> Any:
        """Return a handle of the same parameter that needs no gradient, for `state_dict` and `.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            twin = torch.Tensor.detach(self)
        assert isinstance(twin, torch.Tensor)
        twin.__class__ = ShardParameter
        twin._lane, twin._position, twin._is_param = self._lane, self._position, False  # type: ignore[attr-defined]
        return twin

    def _set_data(self, value: Any) -> None:
        if not isinstance(value, ShardParameter) or value._lane is not self._lane or value._position != self._position:
            raise RuntimeError(self._advice("setting .data"))
        with torch._C.DisableTorchFunctionSubclass():
            dtype = value.dtype
            SET_DATA(self, placeholder(tuple(self.shape), dtype, self.device))
        self._lane.unit.engine.cast_requested(self._lane, dtype)

    def _describe(self) -> str:
        lane = self._lane
        start, stop = self.row_range
        return (
            f"ShardParameter({lane.name_of(self._position)!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', requires_grad={self.requires_grad}, rows {start}:{stop} on rank {lane.rank})"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return self._describe()

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"{self._lane.name_of(self._position)!r} is sharded, and a sharded model can't be deep-copied: copy it "
            "before `prepare` (or before `shard_model`) and shard the copy too."
        )

    def _advice(self, verb: str) -> str:
        name = self._lane.name_of(self._position)
        if in_surgery():
            return (
                f"{name!r} (shape {tuple(self.shape)}) is sharded: parametrizing or pruning it is not possible any "
                "more. Do it before `prepare` (or before `shard_model`)."
            )
        return (
            f"{name!r} (shape {tuple(self.shape)}) is sharded and not whole on rank {self._lane.rank}: {verb} "
            "is not possible here. On all ranks, use `with ourshard.gathered(model):` to read it (`writeback=True` to "
            "change it), `accelerator.get_state_dict(model)` or `ourshard.full_state_dict(model)` to save it, "
            "`accelerator.clip_grad_norm_` to clip."
        )


def hears_of(handle: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook for a leaf that shows the user's hook the user's parameter, with the gradient of the leaf."""
    reference = weakref.ref(handle)

    def on_leaf(leaf: torch.Tensor) -> None:
        own = reference()
        if not isinstance(own, ShardParameter):
            hook(leaf if own is None else own)
            return
        own._heard = True
        try:
            hook(own)
        finally:
            own._heard = False

    return on_leaf


def _leaf_of(value: Any) -> Any:
    return value.leaf if isinstance(value, ShardParameter) else value


def _open_leaf_of(value: Any) -> Any:
    if not isinstance(value, ShardParameter) or not value._lane.unit.open_writes:
        return value
    return value.leaf if value.requires_grad else value.leaf.detach()  # as it is of `.data` and `.detach()`


_OF_THE_HANDLE = (_T.__hash__, SET_DATA)

# What a handle answers without being whole, by torch function.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.stride: ShardParameter._stride,
    _T.is_contiguous: lambda self, **_: True,
    _T.__repr__: lambda self, **_: self._describe(),
    _T.__format__: lambda self, *_: self._describe(),
    _T.__hash__: id,
    _T.register_hook: lambda self, hook: self.leaf.register_hook(hook),
    _T.register_post_accumulate_grad_hook: lambda self, hook: self.leaf.register_post_accumulate_grad_hook(
        hears_of(self, hook)
    ),
    _T.copy_: ShardParameter._copy,
    _T.detach: ShardParameter._detached,
    GET_DATA: ShardParameter._detached,
    SET_DATA: ShardParameter._set_data,
}

# Changes in place that each rank can make of its rows, if every rank makes them.
_ROW_BY_ROW = {_T.mul_, _T.add_, _T.sub_, _T.div_, _T.lerp_, _T.zero_, _T.fill_, nn.init.constant_}
_ROW_BY_ROW |= {_T.clamp_, _T.clamp_min_, _T.clamp_max_, _T.clip_, _T.nan_to_num_, _T.abs_, _T.neg_, _T.pow_}

# The same for lists, as the averages of `torch.optim.swa_utils` are taken.
_LISTS = {getattr(torch, f"_foreach_{name}_") for name in ("mul", "add", "sub", "div", "lerp", "zero", "copy", "neg")}

# Changes of a gradient in place, by numbers, that each rank can make of its rows.
_BY_NUMBERS = {_T.mul_, _T.div_, _T.add_, _T.sub_, _T.clamp_, _T.clip_, _T.nan_to_num_, _T.sign_, _T.neg_}

USE_OUR_SCALER = (
    "torch's GradScaler would look for overflows in this rank's part of the gradients alone, and ranks would skip "
    "different steps. Use `ourshard.ShardGradScaler`, which takes the same arguments; `Accelerator` has it by itself."
)


class ShardGradient(Resting, torch.Tensor):
    """The gradient of a `ShardParameter`: logical shape, this rank's rows, no arithmetic."""

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's rows of the reduced gradient, a view of shape (rows, ...)."""
        return self._lane.local_gradient_rows(self._position)

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (_T.__repr__, _T.__format__):
            return f"ShardGradient({self._lane.name_of(self._position)!r}, shape={tuple(self.shape)})"
        if func is _T.zero_:
            self._lane.zero_gradient(self._position)
            return self
        if func in (_T.detach_, _T.detach, GET_DATA):
            return self
        others = tree_leaves((args[1:], kwargs))
        if func in _BY_NUMBERS and args[0] is self and not any(torch.is_tensor(leaf) for leaf in others):
            with torch.no_grad():
                func(self.local, *args[1:], **kwargs)  # every rank changes its rows alike
            return self
        if func is torch._foreach_zero_:  # `zero_grad(set_to_none=False)` of an optimizer that was not adopted yet
            for gradient in args[0]:
                gradient.zero_()
            return None
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise RuntimeError(USE_OUR_SCALER)
        return super()._called(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardGradient({self._lane.name_of(self._position)!r}, shape={tuple(self.shape)})"

    def _advice(self, verb: str) -> str:
        return (
            f"The gradient of {self._lane.name_of(self._position)!r} is sharded: {verb!r} would see this rank's "
            "part only. Use `accelerator.clip_grad_norm_` / `ourshard.clip_grad_norm_(model, max_norm)` to clip, and "
            "`optimizer.param_groups` for this rank's rows."
        )


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "set_data") or name.startswith("__i") or kwargs.get("out") is not None


def become_handle(parameter: nn.Parameter, lane: Lane, position: int) -> ShardParameter:
    """Turn `parameter` into a handle, in place; its data is let go."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if parameter.device.type == "meta":
        with torch.no_grad():
            take_content(parameter, _like(parameter, placeholder(shape, dtype, lane.device)))
    parameter.data = placeholder(shape, dtype, lane.device)
    parameter.grad = None
    parameter.__class__ = ShardParameter
    assert isinstance(parameter, ShardParameter)
    parameter._lane, parameter._position = lane, position
    return parameter


def _like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    twin = nn.Parameter(data, requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def gradient_handle(lane: Lane, position: int, shape: tuple[int, ...], dtype: torch.dtype) -> ShardGradient:
    """Return a handle that stands for a sharded gradient."""
    handle = placeholder(shape, dtype, lane.device)
    handle.__class__ = ShardGradient
    assert isinstance(handle, ShardGradient)
    handle._lane, handle._position = lane, position
    return handle
