"""Names of PEFT adapters: `lora_A.weight` in a file is `lora_A.default.weight` in the model, where adapters have
names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_KINDS = "lora ia3 hada lokr oft boft vera_lambda randlora fourierft hra miss bone shira trainable_tokens ln_tuning"
_PARTS = "|".join(f"{kind}_" for kind in _KINDS.split())
_ADAPTER = re.compile(rf"^(?P<head>.*\.(?:{_PARTS})\w+)(?P<tail>(?:\.(?:weight|bias))?)$")
_NAMED_ADAPTER = re.compile(rf"^(?P<head>.*\.(?:{_PARTS})\w+)\.(?!weight$|bias$)\w+(?P<tail>(?:\.(?:weight|bias))?)$")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.\w+\.")
_PROMPT = re.compile(r"prompt_encoder\.\w+\.embedding\.weight")
_PROMPT_IN_FILE = "prompt_embeddings"
_MAGNITUDE = "lora_magnitude_vector"  # a module in the model, and a bare tensor in files
DEFAULT = "default"


def with_adapter_name(name: str, config: Mapping[str, Any] | None, adapter: str = DEFAULT) -> str:
    """Return the name within the PEFT model of a tensor of an adapter file."""
    match = _ADAPTER.match(name)
    if match:
        tail = match["tail"] or (".weight" if match["head"].endswith(_MAGNITUDE) else "")
        return f"{match['head']}.{adapter}{tail}"
    if name == _PROMPT_IN_FILE:
        return f"prompt_encoder.{adapter}.embedding.weight"
    for module in (config or {}).get("modules_to_save") or ():
        before, found, after = name.rpartition(f".{module}.")
        if found and not after.startswith("modules_to_save."):
            return f"{before}.{module}.modules_to_save.{adapter}.{after}"
    return name


def is_adapter_name(name: str) -> bool:
    """Tell whether this is a tensor of an adapter as files name it, without the adapter's own name."""
    return _ADAPTER.match(name) is not None


def is_trained_with_peft(name: str) -> bool:
    """Tell whether this is a tensor of an adapter, with its name or without it, or of a module trained beside one."""
    return is_adapter_name(name) or _file_name(name) is not None


def names_with_adapter(names: Iterable[str], trained: Iterable[str]) -> dict[str, str]:
    """Return file name -> model name for those names that the optimizer knows with the name of the adapter in them."""
    names = set(names)
    shorts = ((_file_name(full), full) for full in trained if full not in names)
    return {short: full for short, full in shorts if short in names}


def adapter_only_names(names: Iterable[str]) -> dict[str, str]:
    """Return model name -> file name if all names are of one adapter of PEFT; empty if there are others.

    Tensors of an adapter alone are saved without the adapter's name; `modules_to_save` are such modules, too.
    """
    found = {}
    for name in names:
        short = _file_name(name)
        if short is None:
            return {}
        found[name] = short
    return found


def _file_name(name: str) -> str | None:
    """Return how a file of an adapter alone names a tensor of a PEFT model; None if it is none of the adapter's."""
    match = _NAMED_ADAPTER.match(name)
    if match:
        return match["head"] + ("" if match["head"].endswith(_MAGNITUDE) else match["tail"])
    if _PROMPT.fullmatch(name):
        return _PROMPT_IN_FILE
    return _SAVED_MODULE.sub(".", name) if _SAVED_MODULE.search(name) else None
