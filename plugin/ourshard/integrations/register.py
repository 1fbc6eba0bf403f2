"""What is done to accelerate's modules when they have been imported; called by `_ourshard_autoload`.

Each function looks at the seams first and patches all of them or none. Without ourshard in the config, the environment
or the arguments, what is patched here does what it did before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ourshard.integrations import seams

# What is missing for the launcher half, which spans two modules. Set when the first of them is imported.
_launcher_missing: list[str] = []


def launch_environment(module: ModuleType) -> None:
    """Let the launcher of `accelerate.utils.launch` hand our switch and config to the worker processes."""
    _launcher_missing[:] = seams.of_launch(module)
    if not _launcher_missing:
        for name in seams.LAUNCH:
            setattr(module, name, _handing_over(getattr(module, name)))


def _handing_over(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes the environment of workers; nothing of ours is imported before a launch."""

    @functools.wraps(prepare)
    def prepare_with_ourshard(args: Any) -> Any:
        from ourshard.integrations import launcher

        return getattr(launcher, prepare.__name__)(prepare, args)

    return prepare_with_ourshard


def launch_command(module: ModuleType) -> None:
    """Let `accelerate launch --use_deepspeed` start ourshard where it is asked for, as `--use_fsdp` does.

    Also as `python -m accelerate.commands.launch`: see `PROGRAM` in `_ourshard_autoload`.
    """
    if _launcher_missing or seams.of_command(module):
        return
    original = module.deepspeed_launcher

    @functools.wraps(original)
    def deepspeed_launcher(args: Any) -> None:
        from ourshard.integrations import switch

        (module.multi_gpu_launcher if switch.flag(switch.SWITCH) else original)(args)

    module.deepspeed_launcher = deepspeed_launcher  # type: ignore[attr-defined]


def config_classes(module: ModuleType) -> None:
    """Let `accelerate.commands.config.config_args` read `distributed_type: OURSHARD` and `ourshard_config`."""
    missing = _launcher_missing + seams.of_config(module)
    if not missing:
        from ourshard.integrations.cluster_config import with_section

        module.ClusterConfig = with_section(module.ClusterConfig)  # type: ignore[attr-defined]
    if hasattr(module, "load_config_from_file"):
        load = module.load_config_from_file
        module.load_config_from_file = _refusing(load, missing) if missing else _checking(load)  # type: ignore[attr-defined]


def _checking(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the reader of config files so that a file for ourshard that can't be read is named, in one line."""

    @functools.wraps(load)
    def load_or_name(config_file: Any = None, *args: Any, **kwargs: Any) -> Any:
        from ourshard.integrations.cluster_config import check_file

        if config_file is not None:
            check_file(config_file)
        return load(config_file, *args, **kwargs)

    return load_or_name


def _refusing(load: Callable[..., Any], missing: list[str]) -> Callable[..., Any]:
    """Wrap the reader of config files so that a file for ourshard is refused with the reason."""

    @functools.wraps(load)
    def load_or_refuse(config_file: Any = None, *args: Any, **kwargs: Any) -> Any:
        from ourshard.integrations.switch import ConfigError, mentions_ourshard

        if config_file is not None and mentions_ourshard(config_file):
            raise ConfigError(seams.message(missing))
        return load(config_file, *args, **kwargs)

    return load_or_refuse


def process_state(module: ModuleType) -> None:
    """Let `PartialState()` join processes on CPUs that were launched for ourshard, as `Accelerator()` does.

    accelerate reads ACCELERATE_USE_CPU in `Accelerator()` alone, so that a script which makes its `PartialState` first
    would have as many worlds of one process.
    """
    cls = getattr(module, "PartialState", None)
    if isinstance(cls, type) and not seams.of_state(module):
        cls.__init__ = _joining_cpus(cls.__init__)  # type: ignore[misc]


def _joining_cpus(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        from ourshard.integrations import switch

        original(self, cpu or switch.launched_on_cpus(), **kwargs)

    return __init__


def accelerator_class(module: ModuleType) -> None:
    """Let `Accelerator()` hand out the sharded subclass when ourshard is asked for."""
    missing = seams.of_accelerator(module)
    cls = getattr(module, "Accelerator", None)
    if isinstance(cls, type) and not hasattr(cls.__new__, "_ourshard"):
        cls.__new__ = _new(cls, missing)  # type: ignore[assignment,method-assign]


def local_sgd(module: ModuleType) -> None:
    """Let `LocalSGD` say of a sharded model that its ranks can't part, before it looks for DDP's methods."""
    cls: Any = getattr(module, "LocalSGD", None)
    if cls is None:
        return
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        original(self, accelerator, *args, **kwargs)
        if self.enabled and getattr(accelerator, "is_ourshard", False):
            raise ValueError(
                "LocalSGD lets each rank step whole parameters of its own and averages them from time to time; "
                "sharded, a rank holds and steps its rows alone. Pass enabled=False (gradient_accumulation_steps "
                "communicates less often, too), or train without ourshard."
            )

    cls.__init__ = __init__


def _new(accelerator: type, missing: list[str]) -> staticmethod[..., Any]:
    """Return `Accelerator.__new__`: the one place where the class is chosen.

    Python runs `type(obj).__init__` when `__new__` returns an object of a subclass, so what is handed out is an
    ordinary subclass, the name `Accelerator` never changes, and user subclasses work.
    """
    original = accelerator.__new__

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        from ourshard.integrations import switch

        if switch.asked_for(kwargs):
            if missing:
                raise RuntimeError(seams.message(missing))
            from ourshard.integrations.accelerator import sharded_class

            cls = sharded_class(cls)
        else:
            switch.say_idle_variables()
            cls = _without_plugin(cls) if "ourshard_plugin" in kwargs else cls
        return object.__new__(cls) if original is object.__new__ else original(cls, *args, **kwargs)

    __new__._ourshard = True  # type: ignore[attr-defined]
    __new__.__signature__ = _signature(accelerator)  # type: ignore[attr-defined]
    return staticmethod(__new__)


def _signature(accelerator: type) -> inspect.Signature:
    """Return the constructor's signature with `ourshard_plugin`: without it `inspect` would show `*args, **kwargs`."""
    signature = inspect.signature(accelerator.__init__)  # type: ignore[misc]
    first, *rest = signature.parameters.values()
    own = inspect.Parameter("ourshard_plugin", inspect.Parameter.KEYWORD_ONLY, default=None)
    at = len(rest) - (bool(rest) and rest[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[first.replace(name="cls"), *rest[:at], own, *rest[at:]])


@functools.cache
def _without_plugin(cls: type) -> type:
    """Return a subclass that takes `ourshard_plugin=None`, so that scripts may pass `plugin if wanted else None`."""

    def __init__(self: Any, *args: Any, ourshard_plugin: None = None, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return object.__new__, (cls,), dict(self.__dict__)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__reduce__": __reduce__, "__module__": cls.__module__})
