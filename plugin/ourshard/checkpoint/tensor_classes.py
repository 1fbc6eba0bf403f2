"""Tensors of classes of their own, as torchao's codes of 8 and 4 bits are, as plain tensors and back.

Such a class says by torch's protocol (`__tensor_flatten__`) which plain tensors it stands for. They are saved one by
one as `KEY.ATTRIBUTE`, with `KEY.class`: bytes of JSON that name the class and hold what else it is made of. Nothing is
imported to make one again: its module has to be there, as it is once the optimizer that keeps such tensors is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ourshard.runtime.states import stands_for_others

from . import plain
from .source import CheckpointError

CLASS = ".class"  # a keyword, so that no attribute has this name


def flattened(key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors that state `key` is saved as; a plain one alone, under its own name.

    Raises ValueError if something else that it is made of is no plain data.
    """
    kind = type(value)
    if not stands_for_others(value):
        return {key: value}
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    told = {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "context": plain.encode(context, f"what {kind.__name__} of {key!r} is made of"),
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }
    text = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    return {**{f"{key}.{name}": getattr(value, name) for name in names}, f"{key}{CLASS}": text}


def check_classes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless all classes that these name can be made here."""
    for key, text in tensors.items():
        if key.endswith(CLASS):
            _class_of(_told(key, text), key)


def rebuilt(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state that `flattened` was given, of all of its keys. Raises CheckpointError."""
    state = dict(tensors)
    for name, text in tensors.items():
        if name.endswith(CLASS):
            key, told = name.removesuffix(CLASS), _told(name, text)
            inner = {each.removeprefix(f"{key}."): state.pop(each) for each in tensors if each.startswith(f"{key}.")}
            del inner[CLASS.removeprefix(".")]
            state[key] = _made(told, inner, name)
    return state


def _made(told: Mapping[str, Any], inner: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    kind: Any = _class_of(told, name)
    try:
        value = kind.__tensor_unflatten__(inner, plain.decode(told["context"]), told["shape"], told["stride"])
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{name}: {told['class']} can't be made of {sorted(inner)}: {error}") from error
    assert isinstance(value, torch.Tensor)
    return value


def _class_of(told: Mapping[str, Any], name: str) -> type[torch.Tensor]:
    module, _, path = str(told["class"]).partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # runs no code of a module that loads names on first use
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise CheckpointError(f"{name}: the optimizer keeps {told['class']}, which is not there; import {module} first")
    return found


def _told(name: str, text: torch.Tensor) -> dict[str, Any]:
    try:
        told = json.loads(text.numpy().tobytes())
        if isinstance(told, dict) and {"class", "context", "shape", "stride"} <= told.keys():
            return told
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    raise CheckpointError(f"{name} is damaged: it names no class")
