"""Names of PEFT adapters: `lora_A.weight` in a file is `lora_A.default.weight` in the model, where adapters have
names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_PARTS = r"lora_|ia3_|hada_|lokr_|oft_|boft_|vera_lambda_|randlora_|fourierft_"
_ADAPTER = re.compile(rf"^(?P<head>.*\.(?:{_PARTS})\w+)(?P<tail>(?:\.(?:weight|bias))?)$")
_NAMED_ADAPTER = re.compile(rf"^(?P<head>.*\.(?:{_PARTS})\w+)\.(?!weight$|bias$)\w+(?P<tail>(?:\.(?:weight|bias))?)$")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.\w+\.")
DEFAULT = "default"


def with_adapter_name(name: str, config: Mapping[str, Any] | None, adapter: str = DEFAULT) -> str:
    """Return the name within the PEFT model of a tensor of an adapter file."""
    match = _ADAPTER.match(name)
    if match:
        return f"{match['head']}.{adapter}{match['tail']}"
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
    return any((_ADAPTER.match(name), _NAMED_ADAPTER.match(name), _SAVED_MODULE.search(name)))


def names_with_adapter(names: Iterable[str], trained: Iterable[str]) -> dict[str, str]:
    """Return file name -> model name for those names that the optimizer knows with the name of the adapter in them."""
    names = set(names)
    found: dict[str, str] = {}
    for full in trained:
        if full in names:
            continue
        parts = full.split(".")
        for place in range(1, len(parts)):
            short = ".".join(parts[:place] + parts[place + 1 :])
            if short in names and is_adapter_name(short):
                found[short] = full
                break
    return found


def adapter_only_names(names: Iterable[str]) -> dict[str, str]:
    """Return model name -> file name if all names are of one adapter of PEFT; empty if there are others.

    Tensors of an adapter alone are saved without the adapter's name; `modules_to_save` are such modules, too.
    """
    found = {}
    for name in names:
        match = _NAMED_ADAPTER.match(name)
        if match:
            found[name] = match["head"] + match["tail"]
        elif _SAVED_MODULE.search(name):
            found[name] = _SAVED_MODULE.sub(".", name)
        else:
            return {}
    return found
