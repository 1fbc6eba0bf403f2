"""`ShardCallback`: shard a Trainer's model by adding a callback to its list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from ourshard.config import ShardConfig
from ourshard.integrations import switch
from ourshard.integrations.plugin import ShardPlugin


class ShardCallback(TrainerCallback):
    """Puts a plugin in force when it is made, which is before the Trainer that it is given to makes its Accelerator.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[ShardCallback({"stage": 3})])

    It says how to shard and does nothing else, so it may stay in a list that is used without ourshard's launcher.

    Raises:
        ValueError: when the Trainer turns out not to be sharded: it was made before the callback.
    """

    def __init__(self, plugin: ShardPlugin | ShardConfig | Mapping[str, Any] | None = None) -> None:
        self.plugin = switch.enable(plugin)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Make sure that what is about to train is sharded."""
        from ourshard.integrations.optimizer import ShardOptimizer

        if optimizer is not None and not isinstance(optimizer, ShardOptimizer):
            raise ValueError(
                "ShardCallback: this Trainer trains without ourshard, because it was made before the callback. Give it "
                "to the Trainer's constructor: Trainer(..., callbacks=[ShardCallback(...)])."
            )
