"""`save_pretrained` of packages beside transformers, whose models are sharded, or hold a part that is.

What they write is made of the modules' own parameters, so these are whole meanwhile, on the host of the rank that
writes. Every rank makes the call, as it would any other collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from ourshard.integrations.register_transformers import is_active

Save = Callable[..., Any]

_LABEL = "save_pretrained"


def hub_mixin(module: ModuleType) -> None:
    """Let `save_pretrained` of huggingface_hub's `PyTorchModelHubMixin` write whole weights."""
    _wrap(module, "ModelHubMixin", "save_pretrained", _save_by_one)


def diffusers_model(module: ModuleType) -> None:
    """Let `save_pretrained` of diffusers' models write whole weights."""
    _wrap(module, "ModelMixin", "save_pretrained", _save_by_one)


def sentence_model(module: ModuleType) -> None:
    """Let `save` of sentence-transformers' models write whole weights of the modules beside the transformer."""
    _wrap(module, "BaseModel", "save", _save_pieces)


def _wrap(module: ModuleType, name: str, method: str, ours: Callable[..., Any]) -> None:
    """Put `ours` around a method. A version without it is left alone: sharded parameters say so when they are read."""
    cls = getattr(module, name, None)
    save = getattr(cls, method, None)
    if cls is None or save is None:
        return

    @functools.wraps(save)
    def saving(model: Any, *args: Any, **kwargs: Any) -> Any:
        from ourshard.runtime.part import engines_in

        sharded = is_active() and isinstance(model, nn.Module) and engines_in(model)
        if not sharded:
            return save(model, *args, **kwargs)
        from ourshard.integrations.pretrained import saved_elsewhere

        return None if saved_elsewhere() else ours(save, model, args, kwargs)

    setattr(cls, method, saving)


def _save_by_one(save: Save, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let one rank write, and the others gather with it and wait for the files."""
    from ourshard.integrations import pretrained
    from ourshard.runtime.on_host import whole_on_host

    arguments = pretrained.named(save, model, *args, **kwargs)
    dtype = pretrained.save_dtype(model)
    writes = pretrained.is_among(pretrained.writers(model, arguments), model, arguments)
    ending = pretrained.ending_together(model)  # which looks for what is sharded
    with whole_on_host(model, _LABEL, dtype=dtype, keep=writes), ending:
        return save(model, *args, **kwargs) if writes else None


def _save_pieces(save: Save, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Show what is in no model of transformers whole; those gather by themselves, on every rank that calls."""
    from transformers import PreTrainedModel

    from ourshard.integrations.pretrained import save_dtype
    from ourshard.runtime.on_host import whole_on_host
    from ourshard.runtime.state import persistent
    from ourshard.runtime.wrap import canonical

    inner = tuple(f"{canonical(name)}." for name, part in model.named_modules() if isinstance(part, PreTrainedModel))
    names = [name for name, _ in persistent(model) if not name.startswith(inner)]
    with whole_on_host(model, _LABEL, names=names, dtype=save_dtype(model)):
        return save(model, *args, **kwargs)
