"""The list of all classes and functions that pickles of others may name, with our stand-ins for them.

Nothing else is accepted (`unpickle.py`). The list is what torch, torch's distributed checkpoint, accelerate, the
Transformers Trainer and DeepSpeed write; each was found in files made by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..source import CheckpointError
from .unpickle import Builder, Record

_MAX_DIMS = 64
_VIEWS = frozenset(("conj", "neg"))
_MAX_EXPANDED = 1 << 20  # elements of a tensor that shows the same storage many times (stride 0)


@dataclass(frozen=True, slots=True)
class StorageId:
    """What a pickle says about one storage: its key among the files, its dtype and its length in elements."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as pickled: a view into a storage. Checked by `check_view` when built."""

    storage: StorageId
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    views: frozenset[str] = frozenset()  # "conj", "neg": what is shown is that of what is stored

    @property
    def numel(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Count the elements of the storage from the first to the last that the tensor shows."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Tell whether the elements lie, as they are, in row-major order without gaps.

        Strides of dimensions of 1 don't matter.
        """
        expected = 1
        if self.views:
            return False
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return self.numel == 0
            expected *= length
        return True


def _integers(values: Any, what: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMS:
        raise CheckpointError(f"a pickled tensor has an odd {what}")
    if any(type(value) is not int or value < 0 or value >= 1 << 62 for value in values):
        raise CheckpointError(f"a pickled tensor has an odd {what}")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None) -> PickledTensor:
    if not isinstance(storage, StorageId):
        raise CheckpointError("a pickled tensor has no storage")
    (offset,) = _integers((offset,), "offset")
    shape, stride = _integers(shape, "shape"), _integers(stride, "stride")
    if len(shape) != len(stride):
        raise CheckpointError(f"a pickled tensor has {len(shape)} dimensions and {len(stride)} strides")
    tensor = PickledTensor(storage, offset, shape, stride, dtype or storage.dtype)
    held = storage.numel * storage.dtype.itemsize
    if tensor.span and (offset + tensor.span) * tensor.dtype.itemsize > held:
        raise CheckpointError(f"a pickled tensor of shape {shape} reaches beyond its storage of {held} bytes")
    if tensor.numel > max(storage.numel * storage.dtype.itemsize, _MAX_EXPANDED):
        raise CheckpointError(f"a pickled tensor claims a shape of {shape} with a storage of {held} bytes")
    return tensor


def _tensor_v2(*arguments: Any) -> PickledTensor:
    """Stand in for `_rebuild_tensor_v2`: storage, offset, shape, stride, two flags, and what kind of view it is."""
    tensor = _tensor(*arguments[:4])
    metadata = arguments[6] if len(arguments) > 6 else None
    if not metadata:
        return tensor
    if not isinstance(metadata, dict) or not metadata.keys() <= _VIEWS:
        raise CheckpointError("a pickled tensor has odd metadata")
    return replace(tensor, views=frozenset(name for name, is_set in metadata.items() if is_set))


def _tensor_v3(*arguments: Any) -> PickledTensor:
    """Stand in for `_rebuild_tensor_v3`: storage, offset, shape, stride, two flags, and a dtype of its own."""
    if len(arguments) < 7 or not isinstance(arguments[6], torch.dtype):
        raise CheckpointError("a pickled tensor has an odd dtype")
    storage, offset, shape, stride = arguments[:4]
    return _tensor(storage, offset, shape, stride, arguments[6])


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Stand in for a tensor of a subclass: a DTensor keeps its local tensor and its spec; a Parameter is its data."""
    if not isinstance(function, Builder) or not isinstance(arguments, tuple):
        raise CheckpointError("a pickled tensor of a subclass is damaged")
    made = function.make(*arguments)
    if isinstance(made, Record):
        parts = state if isinstance(state, tuple) else (state,)
        if made.kind == "ShardedTensor":
            made.fields.update(zip(("local_shards", "metadata"), parts, strict=False))
        for part in parts:
            if isinstance(part, dict):
                made.fields.update(part)
    return made


def _wrapper(kind: Any, dtype: Any, shape: Any, *rest: Any) -> Record:
    known = isinstance(kind, Builder) and kind.name in ("DTensor", "ShardedTensor")
    if not known or not isinstance(dtype, torch.dtype):
        raise CheckpointError("a pickled tensor of a subclass other than DTensor and ShardedTensor")
    record = Record(kind.name)
    record.fields.update(dtype=dtype, shape=_integers(shape, "shape"))
    return record


def _encode(text: Any, codec: Any = "utf-8", *rest: Any) -> bytes:
    """Stand in for `_codecs.encode`, which is how protocol 2 writes bytes."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
        raise CheckpointError("a pickle encodes text other than bytes written by protocol 2")
    return text.encode("latin-1")


def _member(target: Any, name: Any) -> Any:
    """Stand in for getattr as protocol 2 has it for the class within ShardedTensor; anything else is refused."""
    if not isinstance(target, Builder) or (target.name, name) != ("ShardedTensor", "ProcessGroupState"):
        raise CheckpointError("holds builtins.getattr, which is not on the list of classes that are read")
    return _record("ProcessGroupState")


def _path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts).replace("//", "/")


def _ordered(items: Any = ()) -> dict[Any, Any]:
    if not isinstance(items, (list, tuple)) or any(
        not isinstance(item, (list, tuple)) or len(item) != 2 for item in items
    ):
        raise CheckpointError("a pickled OrderedDict is damaged")
    if any(type(item[0]) not in (str, int) for item in items):
        raise CheckpointError("a pickled OrderedDict has odd keys")
    return {item[0]: item[1] for item in items}


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list) or any(type(item) not in (str, int, float, bool, bytes) for item in items):
        raise CheckpointError("a pickled set has odd members")
    return set(items)


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _ordered(items)


_NUMPY_SCALARS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "f8": ("d", float), "f4": ("f", float), "i8": ("q", int), "i4": ("i", int), "b1": ("?", bool), "u1": ("B", int)
}  # fmt: skip


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    """Turn a NumPy scalar, as schedulers and metrics hold them, into the Python number."""
    import struct

    name = dtype.get("name") if isinstance(dtype, Record) else None
    if not isinstance(name, str) or name not in _NUMPY_SCALARS or not isinstance(data, bytes):
        raise CheckpointError("a pickled NumPy value other than a plain number")
    code, make = _NUMPY_SCALARS[name]
    return make(struct.unpack(f"<{code}", data)[0])


def _numpy_dtype(name: Any, *rest: Any) -> Record:
    record = Record("numpy.dtype")
    record.fields["name"] = name
    return record


def _record(kind: str, *names: str) -> Builder:
    """Return a builder of records; arguments given by position become the fields `names`."""

    def make(*arguments: Any) -> Record:
        record = Record(kind)
        if len(arguments) > len(names):
            raise CheckpointError(f"a pickled {kind} has more arguments than are known")
        record.fields.update(zip(names, arguments, strict=False))
        return record

    return Builder(kind, make)


@dataclass(frozen=True, slots=True)
class StorageType:
    """The class of a storage as pickled."""

    dtype: torch.dtype


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
        "uint64", "bool", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
}  # fmt: skip

_DCP = "torch.distributed.checkpoint.metadata."
_DTENSOR = "torch.distributed.tensor."
_SHARD = "torch.distributed._shard."

ALLOWED: Mapping[str, Any] = {
    # tensors
    "torch._utils._rebuild_tensor": Builder("_rebuild_tensor", lambda *a: _tensor(*a[:4])),
    "torch._utils._rebuild_tensor_v2": Builder("_rebuild_tensor_v2", _tensor_v2),
    "torch._utils._rebuild_tensor_v3": Builder("_rebuild_tensor_v3", _tensor_v3),
    "torch._utils._rebuild_parameter": Builder("_rebuild_parameter", lambda data, *rest: data),
    "torch._utils._rebuild_parameter_with_state": Builder("_rebuild_parameter_with_state", lambda data, *rest: data),
    "torch._tensor._rebuild_from_type_v2": Builder("_rebuild_from_type_v2", _from_type),
    "torch._utils._rebuild_wrapper_subclass": Builder("_rebuild_wrapper_subclass", _wrapper),
    "torch.nn.parameter.Parameter": Builder("Parameter", lambda data, *rest: data),
    "torch.Tensor": Builder("Tensor", _record("Tensor").make),
    "torch.Size": Builder("Size", lambda shape=(): _integers(shape, "shape")),
    "torch.device": Builder("device", lambda *parts: ":".join(str(part) for part in parts)),
    "torch.serialization._get_layout": Builder("_get_layout", lambda name: name),
    "torch.storage.UntypedStorage": StorageType(torch.uint8),
    **{f"torch.{name}": StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.storage.{name}": StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    # plain Python
    "collections.OrderedDict": Builder("OrderedDict", _ordered),
    "collections.defaultdict": Builder("defaultdict", _default_dict),
    "builtins.dict": Builder("dict", _ordered),
    "__builtin__.dict": Builder("dict", _ordered),
    "builtins.set": Builder("set", _set),
    "__builtin__.set": Builder("set", _set),
    "_codecs.encode": Builder("encode", _encode),
    **{
        f"{module}.{name}": Builder(name, _path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    "numpy.dtype": Builder("numpy.dtype", _numpy_dtype),
    "numpy.core.multiarray.scalar": Builder("numpy.scalar", _numpy_scalar),
    "numpy._core.multiarray.scalar": Builder("numpy.scalar", _numpy_scalar),
    # torch's distributed checkpoint
    _DCP + "Metadata": _record("Metadata"),
    _DCP + "TensorStorageMetadata": _record("TensorStorageMetadata"),
    _DCP + "BytesStorageMetadata": _record("BytesStorageMetadata"),
    _DCP + "TensorProperties": _record("TensorProperties"),
    _DCP + "ChunkStorageMetadata": _record("ChunkStorageMetadata"),
    _DCP + "MetadataIndex": _record("MetadataIndex"),
    _DCP + "StorageMeta": _record("StorageMeta"),
    _DCP + "_MEM_FORMAT_ENCODING": Builder("_MEM_FORMAT_ENCODING", lambda value: value),
    "torch.distributed.checkpoint.filesystem._StorageInfo": _record("_StorageInfo"),
    # FSDP2's one pickle a rank
    "torch.distributed.tensor.DTensor": _record("DTensor"),
    _DTENSOR + "_api.DTensor": _record("DTensor"),
    _DTENSOR + "_dtensor_spec.DTensorSpec": _record("DTensorSpec"),
    _DTENSOR + "_dtensor_spec.TensorMeta": _record("TensorMeta", "shape", "stride", "dtype"),
    _DTENSOR + "_dtensor_spec.ShardOrderEntry": _record("ShardOrderEntry", "tensor_dim", "mesh_dims"),
    _DTENSOR + "placement_types.Shard": _record("Shard", "dim"),
    _DTENSOR + "placement_types.Replicate": _record("Replicate"),
    "torch.distributed.device_mesh.DeviceMesh": _record("DeviceMesh"),
    "torch.distributed._mesh_layout._MeshLayout": _record("_MeshLayout", "shape", "stride"),
    "torch.distributed._mesh_layout._FlatLayout": _record("_FlatLayout", "shape", "stride"),
    # FSDP1's one pickle a rank
    _SHARD + "sharded_tensor.api.ShardedTensor": _record("ShardedTensor"),
    _SHARD + "sharded_tensor.api.ShardedTensor.ProcessGroupState": _record("ProcessGroupState"),
    _SHARD + "sharded_tensor.shard.Shard": _record("Shard"),
    _SHARD + "sharded_tensor.metadata.ShardedTensorMetadata": _record("ShardedTensorMetadata"),
    _SHARD + "sharded_tensor.metadata.TensorProperties": _record("TensorProperties"),
    _SHARD + "sharded_tensor.metadata.MEM_FORMAT_ENCODING": Builder("MEM_FORMAT_ENCODING", lambda value: value),
    _SHARD + "metadata.ShardMetadata": _record("ShardMetadata"),
    _SHARD + "sharding_spec.api.EnumerableShardingSpec": _record("EnumerableShardingSpec"),
    _SHARD + "sharding_spec.chunk_sharding_spec.ChunkShardingSpec": _record("ChunkShardingSpec"),
    "torch.distributed.remote_device._remote_device": _record("_remote_device"),
    "__builtin__.getattr": Builder("getattr", _member),
    "builtins.getattr": Builder("getattr", _member),
    # DeepSpeed
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _record("LossScaler"),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _record("DynamicLossScaler"),
    "deepspeed.runtime.zero.config.ZeroStageEnum": Builder("ZeroStageEnum", lambda value: value),
    "deepspeed.utils.tensor_fragment.fragment_address": _record("fragment_address", "numel", "start"),
}


def storage_of(persistent_id: Any) -> StorageId:
    """Read the id with which torch.save refers to a storage: ('storage', class, key, location, length)."""
    if not (isinstance(persistent_id, tuple) and len(persistent_id) == 5 and persistent_id[0] == "storage"):
        raise CheckpointError("the pickle refers to something that is no storage")
    _, kind, key, _, numel = persistent_id
    if (
        not isinstance(kind, StorageType)
        or not isinstance(key, str)
        or type(numel) is not int
        or not 0 <= numel < 1 << 62
    ):
        raise CheckpointError("the pickle refers to a damaged storage")
    return StorageId(key, kind.dtype, numel)
