"""How ourshard is asked for: the environment, `enable`, or an argument of `Accelerator`.

The environment is the contract that every launcher can keep: `ACCELERATE_USE_OURSHARD=true`, and `OURSHARD_CONFIG`
with the config as JSON. `accelerate launch` sets both from the YAML; `torchrun`, SLURM or a notebook may set them too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ourshard.config import ShardConfig
    from ourshard.integrations.plugin import ShardPlugin

SWITCH = "ACCELERATE_USE_OURSHARD"
CONFIG = "OURSHARD_CONFIG"  # read and written by `ourshard.flags.sources`, which is imported only where ourshard is on
ACCUMULATION = "OURSHARD_GRADIENT_ACCUMULATION_STEPS"  # a number; the launcher writes it, where its sources say it
GRADIENT_CLIPPING = "OURSHARD_GRADIENT_CLIPPING"  # a number; the launcher writes it from a DeepSpeed config
GRAD_SCALER = "OURSHARD_GRAD_SCALER"  # JSON, arguments of torch's GradScaler; the launcher writes it from an fp16 block
# JSON, the optimizer and scheduler blocks of a DeepSpeed config as they are written, for a Trainer; from the launcher.
BLOCKS = "OURSHARD_DEEPSPEED_BLOCKS"
DISABLE = "OURSHARD_DISABLE"
USE_CPU = "ACCELERATE_USE_CPU"  # accelerate's own

# What `enable` was given, and the environment that it wrote. An environment that has changed since is the newer word.
_enabled: ShardPlugin | None = None
_enabled_as: tuple[str | None, str | None] = (None, None)


class ConfigError(ValueError, SystemExit):
    """A config that cannot work, found by the launcher.

    To callers it is a `ValueError`. Uncaught it ends a command with its message as the only line, as `SystemExit` does:
    the user of `accelerate launch` has a YAML to correct and no use for the launcher's traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message


_YES = ("1", "true", "t", "yes", "y", "on")  # accelerate's own words
_NO = ("", "0", "false", "f", "no", "n", "off")


def flag(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a variable of the environment says yes.

    Raises:
        ConfigError: it says neither yes nor no.
    """
    value = (os.environ if environment is None else environment).get(name, "")
    if value.strip().lower() not in _YES + _NO:
        raise ConfigError(f"{name} is {value!r} in the environment; write true or false.")
    return value.strip().lower() in _YES


def handed_on(name: str) -> dict[str, Any]:
    """Return the JSON object that the launcher has put into a variable; empty where it has not."""
    told: dict[str, Any] = json.loads(os.environ.get(name, "{}"))
    return told


def asked_for(arguments: Mapping[str, Any]) -> bool:
    """Return whether `Accelerator(**arguments)` is to be ours."""
    handlers = arguments.get("kwargs_handlers") or ()
    asked = (
        arguments.get("ourshard_plugin") is not None
        or flag(SWITCH)
        or any(getattr(handler, "is_ourshard_plugin", False) for handler in handlers)
    )
    return asked and not flag(DISABLE)  # what is no word for yes or no, the hooks take for no: `flag` refuses it


def say_idle_variables() -> None:
    """Say once, where ourshard was not asked for, that a config in the environment has no effect."""
    if not any(name.startswith("OURSHARD_") for name in os.environ):
        return
    from ourshard.flags.sources import variables
    from ourshard.integrations.notes import say_once

    idle = sorted({CONFIG, *variables()} & set(os.environ))
    if idle:
        say_once([f"{', '.join(idle)}: no effect, because {SWITCH} is not true; set that to true to shard."])


def launched_on_cpus() -> bool:
    """Return whether this is one of several processes that a launcher started on CPUs, with ourshard switched on."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    return several and flag(SWITCH) and flag(USE_CPU)


def enable(plugin: ShardPlugin | ShardConfig | Mapping[str, Any] | None = None) -> ShardPlugin:
    """Make every `Accelerator` that this process and its children create from now on a sharded one.

    Call it before `Accelerator()`, or before `notebook_launcher` and `debug_launcher`. It writes switch and config to
    the environment, which is how spawned processes learn of it. Returns the plugin in force.
    """
    global _enabled, _enabled_as
    from ourshard.flags.result import from_values
    from ourshard.flags.sources import for_environment
    from ourshard.integrations.plugin import ShardPlugin

    if flag(DISABLE):
        raise ValueError(f"ourshard.enable(): {DISABLE}=1 is set; unset it, or leave the call out.")
    wanted = plugin if isinstance(plugin, ShardPlugin) else ShardPlugin(plugin)
    if enabled_plugin() is None:  # else the environment is what an earlier call wrote
        wanted.check_environment()
    _enabled = wanted
    os.environ[SWITCH] = "true"
    os.environ.update(for_environment(from_values(wanted.config.to_dict(), "ourshard.enable()")))
    _enabled_as = _environment()
    return wanted


def disable() -> None:
    """Take `enable` back: an `Accelerator` created from now on is the stock one."""
    global _enabled
    from ourshard.flags.sources import ORIGINS_VARIABLE

    _enabled = None
    for name in (SWITCH, CONFIG, ORIGINS_VARIABLE):
        os.environ.pop(name, None)


def enabled_plugin() -> ShardPlugin | None:
    """Return the plugin that `enable` was given, if the environment still is what `enable` made it."""
    return _enabled if _enabled_as == _environment() else None


def _environment() -> tuple[str | None, str | None]:
    return os.environ.get(SWITCH), os.environ.get(CONFIG)


def mentions_ourshard(config_file: str | os.PathLike[str]) -> bool:
    """Return whether a config file of accelerate, or the environment, asks for ourshard. Reads text, not YAML."""
    path = Path(config_file)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return flag(SWITCH) or "OURSHARD" in text or "ourshard_config" in text
