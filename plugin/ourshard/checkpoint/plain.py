"""Plain data as JSON and back, exactly: what JSON lacks (tuples, tensors, bytes, NaN, keys that are no text) is tagged.

Used for scheduler, scaler, random states and what the user's program adds. Anything else (functions, classes) is
refused when saving, and a tag that is not known is refused when loading: nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from .safetensors_file import DTYPE_NAMES, DTYPES
from .source import CheckpointError

TAG = "$"
_SAFE_NUMPY_KINDS = "biufcSU"
_SCALARS = (bool, int, str, type(None))


def encode(value: Any, where: str = "value") -> Any:
    """Return what json.dumps takes. Raises ValueError naming the place of what cannot be saved."""
    if type(value) in _SCALARS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, (tuple, set, frozenset)):
        tag = "tuple" if isinstance(value, tuple) else "set"
        return {TAG: tag, "value": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    return _encode_binary(value, where)


def decode(value: Any) -> Any:
    """Return the data that `encode` was given; subclasses of dict come back as dict. Raises CheckpointError."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item) for key, item in value.items()}
    tag = value[TAG]
    if not isinstance(tag, str) or tag not in _DECODERS:
        raise CheckpointError(f"unknown kind of data {tag!r}; it may be of a newer version")
    try:
        return _DECODERS[tag](value)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"damaged data of kind {tag!r}: {error}") from error


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(type(key) is str for key in value) and TAG not in value:
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[encode(key, f"key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {TAG: "dict", "value": pairs}


def _encode_binary(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.dtype not in DTYPE_NAMES:
            what = f"{type(value).__name__} of {value.dtype}, {value.layout}"
            raise ValueError(f"{where} is a {what}: only plain tensors can be saved")
        flat = value.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {TAG: "tensor", "dtype": DTYPE_NAMES[flat.dtype], "shape": list(flat.shape), "value": _to_text(data)}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in _SAFE_NUMPY_KINDS:
        tag = "array" if isinstance(value, numpy.ndarray) else "number"
        return {TAG: tag, "dtype": value.dtype.str, "shape": list(value.shape), "value": _to_text(value.tobytes())}
    if type(value) is complex:
        return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {TAG: "bytes", "value": _to_text(bytes(value))}
    if isinstance(value, int | float | str):  # subclasses: enums, text of numpy
        return encode(next(kind for kind in (int, float, str) if isinstance(value, kind))(value), where)
    raise ValueError(f"{where} is a {type(value).__name__}: a checkpoint holds plain data and tensors only")


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_text(value: Mapping[str, Any]) -> bytearray:
    return bytearray(base64.b64decode(value["value"], validate=True))


def _decode_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    data, dtype, shape = _from_text(value), DTYPES[value["dtype"]], value["shape"]
    if math.prod(shape) * dtype.itemsize != len(data) or any(length < 0 for length in shape):
        raise ValueError(f"{len(data)} bytes for shape {shape} of {dtype}")
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")


def _decode_array(value: Mapping[str, Any]) -> Any:
    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in _SAFE_NUMPY_KINDS:
        raise ValueError(f"dtype {dtype}")
    return numpy.frombuffer(_from_text(value), dtype=dtype).reshape(value["shape"])


def _decode_dtype(value: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(value["value"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value['value']!r} is no dtype")
    return dtype


_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda value: float(value["value"]),
    "complex": lambda value: complex(*map(float, value["value"])),
    "tuple": lambda value: tuple(decode(value["value"])),
    "set": lambda value: set(decode(value["value"])),
    "dict": lambda value: {decode(key): decode(item) for key, item in value["value"]},
    "bytes": lambda value: bytes(_from_text(value)),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "number": lambda value: _decode_array(value)[()],
    "dtype": _decode_dtype,
}
