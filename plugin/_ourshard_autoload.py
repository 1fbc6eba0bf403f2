"""Put the import hooks of ourshard in place. torch calls `install` through the `torch.backends` entry point.

This runs in every process that imports torch, so it imports nothing but what Python has loaded anyway, it never
raises, and it stays a top-level module of its own: if it could not be imported, `import torch` would fail for all.

Note [Post-import hooks]
A finder at the front of `sys.meta_path` looks a name up in one dict. For the few modules in `HOOKS` it lets the other
finders find the spec and puts a loader around theirs; the loader takes itself out of the module again, runs it, and
then calls the function that `HOOKS` names, in `ourshard.integrations`.

wrapt's `when_imported` is not used, for two reasons. It fires at once for a module that is in `sys.modules` but still
being executed, and that is a common case here: `from accelerate import Accelerator` is what imports torch, so that
`accelerate.accelerator` stands at its own `import torch` when we are called. And importing wrapt would cost every
process that imports torch more than all of this does. For such a half-made module we wait until the import system says
it is done: it sets `spec._initializing` to False, so for that long the spec is of a subclass that notices.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

# module -> function, in `ourshard.integrations`, that is called with the module when it is complete
HOOKS = {
    "accelerate.utils.launch": "register.launch_environment",
    "accelerate.commands.config.config_args": "register.config_classes",
    "accelerate.commands.launch": "register.launch_command",
    "accelerate.state": "register.process_state",
    "accelerate.accelerator": "register.accelerator_class",
    "accelerate.local_sgd": "register.local_sgd",
    "transformers.training_args": "register_transformers.training_arguments",
    "transformers.trainer": "register_transformers.trainer_class",
    "transformers.modeling_utils": "register_transformers.pretrained_model",
    "peft.peft_model": "register_transformers.peft_model",
    "trl.generation.vllm_generation": "register_trl.vllm_generation",
    "trl.trainer.dpo_trainer": "register_trl.preference_trainer",
    "trl.trainer.kto_trainer": "register_trl.preference_trainer",
    "transformers.generation.continuous_batching.continuous_api": "register_generation.continuous_batching",
    "huggingface_hub.hub_mixin": "savers.hub_mixin",
    "diffusers.models.modeling_utils": "savers.diffusers_model",
    "sentence_transformers.base.model": "savers.sentence_model",
}

# Of these, the one that `python -m` runs. It would be `__main__` then, which is made without a loader's hook.
PROGRAM = "accelerate.commands.launch"


def install() -> None:
    """Hook the modules in `HOOKS`, those imported already and those to come. Idempotent; never raises."""
    try:
        if _disabled() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        _let_ranks_restart()
        sys.meta_path.insert(0, _Finder())
        for name in HOOKS:
            module = sys.modules.get(name)
            if module is not None:
                _hook_imported(name, module)
    except Exception as error:
        _complain("the interpreter's imports", error)


def _disabled() -> bool:
    return _says_yes("OURSHARD_DISABLE")


def _says_yes(name: str) -> bool:
    """Read a switch of the environment as `ourshard.integrations.switch.flag` does, without importing it."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def _let_ranks_restart() -> None:
    """Give ranks that torchrun starts anew a store of their own; read by torchrun's c10d rendezvous only.

    Otherwise they find the addresses of the ranks before them in the store, and connect to ports that are closed.
    """
    if _says_yes("ACCELERATE_USE_OURSHARD"):
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _hook_imported(name: str, module: Any) -> None:
    spec = getattr(module, "__spec__", None)
    if getattr(spec, "_initializing", False):
        _await(spec)
    else:
        _fire(name, module)


def _fire(name: str, module: Any) -> None:
    """Call the hook of a module that is complete."""
    try:
        import importlib

        home, function = HOOKS[name].split(".")
        getattr(importlib.import_module(f"ourshard.integrations.{home}"), function)(module)
    except Exception as error:
        _complain(name, error)


def _complain(what: str, error: Exception) -> None:
    warnings.warn(
        f"ourshard could not hook into {what} and is off in this process: {error!r}. OURSHARD_DISABLE=1 keeps it off.",
        RuntimeWarning,
        stacklevel=3,
    )


def _await(spec: Any) -> None:
    """Fire the hook of `spec`'s module as soon as its import ends. See Note [Post-import hooks]."""
    kind = type(spec)

    def get(self: Any) -> bool:
        return bool(self.__dict__.get("_initializing"))

    def notice(self: Any, initializing: bool) -> None:
        self.__dict__["_initializing"] = initializing
        if not initializing:
            self.__class__ = kind
            if self.name in sys.modules:  # a module whose import failed is gone
                _fire(self.name, sys.modules[self.name])

    spec.__class__ = type(kind.__name__, (kind,), {"_initializing": property(get, notice)})


class _Loader:
    """Run a module with its own loader, then its hook; leave no trace in the module.

    `python -m` asks for `get_code` alone. Where ourshard is switched on, it gets a program that imports `PROGRAM` like
    any module and calls its `main`: importing `accelerate` imported torch, so that this hook is there in time.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _fire(module.__spec__.name, module)

    def get_code(self, name: str) -> Any:
        if name == PROGRAM and _says_yes("ACCELERATE_USE_OURSHARD"):
            return compile(f"from {name} import main\nmain()\n", __file__, "exec")
        return self._loader.get_code(name)


class _Finder:
    """Find what the other finders find; the modules in `HOOKS` get a loader that calls their hook."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in HOOKS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None
