"""`ShardPlugin`: what an `Accelerator` is given to shard with."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ourshard.config import ShardConfig
from ourshard.flags.result import RUN, disagreement
from ourshard.flags.sources import from_environment
from ourshard.values import flatten

if TYPE_CHECKING:
    from torch import nn


@dataclass(init=False)
class ShardPlugin:
    """The config of an `Accelerator`, and of single models where they differ.

    Give it as `Accelerator(ourshard_plugin=...)`, among `kwargs_handlers`, or to `ourshard.enable`. `config` may be a
    `ShardConfig` or nested values as YAML has them; `None` means what the environment says (`OURSHARD_CONFIG`, which
    `accelerate launch` sets), else plain stage 3.

        plugin = ShardPlugin({"stage": 3}).for_model(discriminator, stage=1)
    """

    config: ShardConfig
    gradient_clipping: float | None  # largest norm; each optimizer step clips to it. A DeepSpeed config sets it
    blocks: Mapping[str, Any]  # optimizer and scheduler of a DeepSpeed config, as written, for who stands for them
    counts: bool  # bytes by kind are counted, whatever `config` says of the ledger; ShardMonitorCallback asks for it
    _changes: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = field(repr=False, compare=False)

    # `switch.asked_for` knows a plugin among `kwargs_handlers` by this
    is_ourshard_plugin: ClassVar[bool] = True

    def __init__(
        self, config: ShardConfig | Mapping[str, Any] | None = None, gradient_clipping: float | None = None
    ) -> None:
        self.config = _read(config)
        if gradient_clipping is not None and not gradient_clipping > 0:
            raise ValueError(f"ShardPlugin: gradient_clipping is {gradient_clipping!r}; give a norm above 0, or None.")
        self.gradient_clipping = gradient_clipping
        self.blocks = {}
        self.counts = False
        self._changes = weakref.WeakKeyDictionary()

    def check_environment(self) -> None:
        """Raise `ValueError` where the environment says another thing than this plugin."""
        mine, theirs = flatten(self.config.to_dict()), from_environment()
        for key, value in theirs.said.items():
            if not key.startswith(RUN) and mine[key] != value:
                raise ValueError(disagreement(key, mine[key], "the ShardPlugin", value, theirs.origins[key]))

    def for_model(self, model: nn.Module, **changes: Any) -> ShardPlugin:
        """Let `model` differ from the others in some top-level keys; call it before `prepare`. Returns the plugin.

        The model is known by identity, not by class: a teacher and its student often are of one class.
        """
        self.config.replace(**changes)  # refuse a bad value here, where the caller is
        self._changes[model] = changes
        return self

    def config_for(self, model: nn.Module) -> ShardConfig:
        """Return the config that `model` is sharded with."""
        changes = self._changes.get(model)
        counted = {"ledger": True} if self.counts else {}
        return self.config.replace(**{**(changes or {}), **counted}) if changes or counted else self.config

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_changes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without the differences of single models: another process does not share their identity."""
        self.__dict__.update(state, _changes=weakref.WeakKeyDictionary())


def _read(config: ShardConfig | Mapping[str, Any] | None) -> ShardConfig:
    if isinstance(config, ShardConfig):
        return config
    if config is None:
        return from_environment().config
    if isinstance(config, Mapping):
        return ShardConfig.from_dict(config)
    raise ValueError(
        f"ShardPlugin: config is {config!r}; give a ShardConfig, a mapping such as {{'stage': 3}}, or nothing."
    )
