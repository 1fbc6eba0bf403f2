"""Whole parameters of a sharded model, one after the other, for who takes them elsewhere (an inference engine)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ourshard.integrations import models
from ourshard.runtime import state as _state
from ourshard.runtime.api import sharded_engine
from ourshard.runtime.engine import Engine
from ourshard.runtime.on_host import showing
from ourshard.runtime.part import part_state

Named = Iterator[tuple[str, torch.Tensor]]


def iter_full_parameters(
    model: nn.Module, dtype: torch.dtype | None = None, *, merge_adapters: bool = False, wanted: bool = True
) -> Named:
    """Yield (name, whole parameter on the CPU). Collective: exhaust it on every rank.

    One lane is in memory at a time. Names are the model's, dtypes those that it was loaded in, or `dtype`. A rank that
    has no use for them says `wanted=False`, takes part and gets none. With `merge_adapters` the adapters of PEFT that
    are active are added to their weights, in a copy; names are those of the base model then, and one unit is in memory
    at a time.

    Raises:
        ValueError: the model is not sharded, or its adapters have no sum with weights (prompts, prefixes).
    """
    engine = sharded_engine(model)
    inner = models.inner(model)
    if merge_adapters and hasattr(inner, "peft_config"):
        yield from _merged(engine, inner, dtype, wanted)
        return
    for names, value in _state.iter_full(engine, dtype=dtype, wanted=wanted):
        yield names[0], value


def _merged(engine: Engine, model: Any, dtype: torch.dtype | None, wanted: bool) -> Named:
    from peft import PeftModel

    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ValueError(
            "iter_full_parameters: merge_adapters: prompts and prefixes have no sum with weights; leave it out."
        )
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    units = {id(module) for unit in engine.units if not unit.rooted for module in unit.modules}
    parts = [(name, module) for name, module in base.named_modules() if id(module) in units]
    done: set[str] = set()  # of a unit inside of another one, or of the root
    for place, module in [*parts, ("", base)]:
        start = f"{place}." if place else ""
        names = {name for name, _ in module.named_parameters() if start + name not in done}
        done.update(start + name for name in names)
        state = part_state(module, "iter_full_parameters, merged", names=names, dtype=dtype, keep=wanted)
        for name, value in (_merge(module, state) if wanted else {}).items():
            yield start + name, value


@torch.no_grad()
def _merge(module: nn.Module, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters in `state` with active adapters added, by the names that the module had before PEFT."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, torch.Tensor] = {}
    with showing(module, state):
        tuners = {name: each for name, each in module.named_modules() if isinstance(each, BaseTunerLayer)}
        whole = {name: each for name, each in tuners.items() if any(key.startswith(f"{name}.") for key in state)}
        before = {name: list(each.merged_adapters) for name, each in whole.items()}
        try:
            for each in whole.values():
                if not each.merged and not each.disable_adapters:
                    each.merge()
            for name, value in module.named_parameters():
                plain = _base_name(module, name, tuners)
                if name in state and plain is not None:
                    found[plain] = value.detach()
        finally:
            for name, each in whole.items():
                each.merged_adapters[:] = before[name]
    return found


def _base_name(module: nn.Module, name: str, tuners: dict[str, Any]) -> str | None:
    """Return the name of a parameter before PEFT, or None for what PEFT put in."""
    for tuner in tuners:
        inner = name.removeprefix(f"{tuner}.") if tuner else name
        if (not tuner or inner != name) and not inner.startswith("base_layer."):
            return None
    parts = name.split(".")
    if "modules_to_save" in parts or "original_module" in parts:
        index = parts.index("modules_to_save") if "modules_to_save" in parts else parts.index("original_module")
        wrapper: Any = module.get_submodule(".".join(parts[:index]))
        active = getattr(wrapper, "active_adapters", ())
        trained = [each for each in active if each in getattr(wrapper, "modules_to_save", {})]
        if parts[index] == "modules_to_save":
            if parts[index + 1] not in trained:
                return None
            del parts[index + 1]
        elif trained:
            return None
        del parts[index]
    return ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))
