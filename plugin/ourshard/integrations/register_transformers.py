"""What is done to the modules of transformers and PEFT when they have been imported; called by `_ourshard_autoload`.

As in `register.py`, the seams are looked at first. A version whose seams moved is left as it is, and the first use of
ourshard with it raises. Each wrap does what the wrapped function did wherever no sharded model is concerned.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ourshard.integrations import switch
from ourshard.integrations import transformers_seams as seams


def trainer_class(module: ModuleType) -> None:
    """Let `Trainer` save and load whole states, by the functions that `seams.TRAINER` names."""
    lost = seams.of_trainer(module)
    cls = getattr(module, "Trainer", None)
    if lost and isinstance(cls, type):
        _refuse(cls, "__init__", "transformers", lost)
        return
    for name in seams.TRAINER:
        _wrap(cls, name, functools.partial(_trainer_method, name))
    last = module.get_last_checkpoint

    @functools.wraps(last)
    def get_last_checkpoint(folder: str) -> str | None:
        if not switch.flag(switch.SWITCH):
            return last(folder)  # type: ignore[no-any-return]
        from ourshard.integrations.trainer_resume import newest_complete

        return newest_complete(folder)

    module.get_last_checkpoint = get_last_checkpoint  # type: ignore[attr-defined]


def _trainer_method(name: str, method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    ours = seams.TRAINER[name]
    if not _concerns(ours.when, trainer):
        return method(trainer, *args, **kwargs)
    module = importlib.import_module(f"ourshard.integrations.{ours.module}")
    return getattr(module, name)(method, trainer, *args, **kwargs)


def _concerns(when: seams.When, trainer: Any) -> bool:
    if when is seams.When.SHARDED:
        return bool(getattr(getattr(trainer, "accelerator", None), "is_ourshard", False))
    return when is seams.When.ALWAYS or switch.flag(switch.SWITCH)


def training_arguments(module: ModuleType) -> None:
    """Let `TrainingArguments` leave the model where it is, and keep other engines out, while ourshard is on."""
    lost = seams.of_arguments(module)
    cls = getattr(module, "TrainingArguments", None)
    if lost:
        if isinstance(cls, type):
            _refuse(cls, "__init__", "transformers", lost)
        return
    place = inspect.getattr_static(cls, "place_model_on_device")

    def place_model_on_device(self: Any) -> Any:
        return False if switch.flag(switch.SWITCH) else place.__get__(self, type(self))

    cls.place_model_on_device = property(place_model_on_device, doc=place.__doc__)  # type: ignore[union-attr]

    def post_init(method: Callable[..., Any], args: Any) -> None:
        if not switch.flag(switch.SWITCH):
            method(args)
            return
        from ourshard.integrations.trainer_arguments import finish

        finish(method, args)

    _wrap(cls, "__post_init__", post_init)


def pretrained_model(module: ModuleType) -> None:
    """Let `from_pretrained` leave weights in their files, and `save_pretrained` write whole ones."""
    lost = seams.of_model(module)
    cls = getattr(module, "PreTrainedModel", None)
    if lost:
        if isinstance(cls, type):
            _refuse(cls, "save_pretrained", "transformers", lost)
        return
    _wrap_loading(cls)
    _wrap_finding(cls)
    _wrap_saving(cls, "save_pretrained")


def _wrap_loading(cls: Any) -> None:
    kind = type(inspect.getattr_static(cls, "_load_pretrained_model"))
    load = cls._load_pretrained_model  # bound, where it is a class method
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_or_leave(*args: Any, **kwargs: Any) -> Any:
        from ourshard.integrations.loading import load_pretrained

        if kind is classmethod:
            args = args[1:]
        return load_pretrained(load, dict(signature.bind(*args, **kwargs).arguments))

    cls._load_pretrained_model = kind(load_or_leave)


def _wrap_finding(cls: Any) -> None:
    """Let `from_pretrained` say of a checkpoint by rows what makes a model of it."""
    load = inspect.getattr_static(cls, "from_pretrained").__func__

    @functools.wraps(load)
    def load_or_explain(kind: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(kind, *args, **kwargs)
        except OSError as error:
            path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            if path is None or not os.path.isfile(os.path.join(path, "ourshard", "ourshard.json")):
                raise
            raise OSError(
                f"{path} is a checkpoint by rows, which any number of ranks resumes from. For a model to load: "
                f"ourshard convert {path} DIR --to safetensors"
            ) from error

    cls.from_pretrained = classmethod(load_or_explain)


def _wrap_saving(cls: Any, function: str) -> None:
    def saving(save: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return save(model, *args, **kwargs)
        from ourshard.integrations import pretrained

        return getattr(pretrained, function)(save, model, pretrained.named(save, model, *args, **kwargs))

    _wrap(cls, "save_pretrained", saving)


def peft_model(module: ModuleType) -> None:
    """Let PEFT's `save_pretrained` gather adapters, and nothing else."""
    lost = seams.of_peft(module)
    cls = getattr(module, "PeftModel", None)
    if not lost:
        _wrap_saving(cls, "save_adapters")
    elif isinstance(cls, type):
        _refuse(cls, "save_pretrained", "peft", lost)


def is_active() -> bool:
    """Return whether any model of this process is sharded."""
    import sys

    engine = sys.modules.get("ourshard.runtime.engine")
    return engine is not None and bool(engine.ENGINES)


def _wrap(cls: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around(method, self, ...)` in the place of a method."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(cls, name, wrapped)


def _refuse(cls: type, name: str, package: str, lost: list[str]) -> None:
    """Let a method raise, while ourshard is on, that this version can't be worked under."""

    def refusing(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if switch.flag(switch.SWITCH) or is_active():
            raise RuntimeError(seams.message(package, lost))
        return method(*args, **kwargs)

    _wrap(cls, name, refusing)
