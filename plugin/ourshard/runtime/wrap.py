"""Find the units of a model: modules whose parameters move together."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ourshard.config import WrapConfig, WrapPolicy

logger = logging.getLogger("ourshard")

# Segments that wrappers put into names; they never reach a name that a user or a file sees.
_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical(name: str) -> str:
    """Return a dotted name without the segments that `torch.compile` and checkpoint wrappers add."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


@dataclass(frozen=True, slots=True)
class UnitModule:
    """A module chosen as unit, and its canonical name."""

    name: str
    module: nn.Module


def find_units(model: nn.Module, config: WrapConfig) -> list[UnitModule]:
    """Return the unit modules in the order of `named_modules`, without the root.

    Raises `ValueError` when a name that the user gave matches nothing, with the candidates.
    """
    if config.policy is WrapPolicy.CLASSES:
        found = _by_class(model, config.classes, strict=True)
    elif config.policy is WrapPolicy.MODULES:
        found = _by_name(model, config.modules)
    elif config.policy is WrapPolicy.MIN_PARAMS:
        found = _by_numel(model, config.min_params)
    elif config.policy is WrapPolicy.NONE:
        found = set()
    else:
        found = _automatic(model)
    units = [UnitModule(canonical(name), m) for name, m in model.named_modules() if m in found and m is not model]
    return [unit for unit in units if next(unit.module.parameters(), None) is not None]


def _class_names(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


def _by_class(model: nn.Module, names: Iterable[str], *, strict: bool) -> set[nn.Module]:
    known = _class_names(model)
    missing = [name for name in names if name not in known]
    found = {module for module in model.modules() if type(module).__name__ in set(names)}
    if missing and strict:
        text = "; ".join(f"{name!r}{_candidates(name, known)}" for name in missing)
        if not found:
            raise ValueError(
                f"wrap.classes (FSDP's transformer_layer_cls_to_wrap): no module of the model is of class {text}. "
                "Name the class of its layers, or leave the key out: units are then found from the model."
            )
        logger.warning("wrap.classes: some names match no module of the model: %s", text)
    return found


def _candidates(name: str, known: Counter[str]) -> str:
    lowered = {k.lower(): k for k in known}
    close = [lowered[k] for k in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]
    shown = close or [k for k, _ in known.most_common(12)]
    lead = "did you mean" if close else "the model has"
    return f" ({lead} {', '.join(f'{k} ({known[k]})' for k in shown)})"


def _by_name(model: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    modules = {canonical(name): module for name, module in model.named_modules()}
    missing = [name for name in names if name not in modules]
    if missing:
        close = {name: difflib.get_close_matches(name, modules, n=3) for name in missing}
        text = "; ".join(f"{name!r}" + (f" (close: {', '.join(c)})" if c else "") for name, c in close.items())
        raise ValueError(f"wrap.modules: the model has no module named {text}.")
    return {modules[name] for name in names}


def _by_numel(model: nn.Module, least: int) -> set[nn.Module]:
    """Choose the smallest modules that hold at least `least` elements not already in a chosen module below them.

    Those without a forward (lists and dicts of modules) are left to the module around them: nobody would call them. So
    is what an adapter has (PEFT's have a `base_layer`): it reads, or parametrizes, weights of what it wraps.
    """
    chosen: set[nn.Module] = set()

    def visit(module: nn.Module, adapted: bool = False) -> int:
        inner = adapted or isinstance(getattr(module, "base_layer", None), nn.Module)
        free = sum(p.numel() for p in module.parameters(recurse=False))
        free += sum(visit(child, inner) for child in module.children())
        if free >= least and _has_forward(module) and not adapted:
            chosen.add(module)
            return 0
        return free

    visit(model)
    return chosen


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _automatic(model: nn.Module) -> set[nn.Module]:
    """Use the model's own `_no_split_modules` as far as they exist in it, else repeated siblings."""
    names: set[str] = set()
    for module in model.modules():
        own = getattr(module, "_no_split_modules", None)
        names.update(own if isinstance(own, (list, tuple, set)) else ())
    found = _by_class(model, names, strict=False)
    return found or _repeated_siblings(model)


def _repeated_siblings(model: nn.Module) -> set[nn.Module]:
    """Choose the outermost blocks that repeat: two or more children of one class in a list of modules.

    A list of experts is passed over: which of them run depends on the data of a rank, so they belong in one unit
    with the module that chooses between them.
    """
    chosen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and "expert" not in name.lower():
            classes = Counter(type(block) for block in module if any(True for _ in block.parameters()))
            repeated = {cls for cls, count in classes.items() if count > 1 and not _is_leaf(cls, module)}
            chosen.update(block for block in module if type(block) in repeated)
        for inner, child in module.named_children():
            if child not in chosen:
                visit(inner, child)

    def _is_leaf(cls: type, blocks: nn.Module) -> bool:
        return all(next(block.children(), None) is None for block in blocks.children() if type(block) is cls)

    visit("", model)
    return {module for module in chosen if not _inside(module, chosen)}


def _inside(module: nn.Module, chosen: set[nn.Module]) -> bool:
    return any(module is not other and any(m is module for m in other.modules()) for other in chosen)
