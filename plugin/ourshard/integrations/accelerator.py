"""The sharded subclass of `Accelerator`.

`register.py` hands it out through `Accelerator.__new__`. It is an ordinary subclass: `isinstance` holds, `super()` is
accelerate's own code, and `distributed_type` stays what it is (MULTI_GPU, MULTI_CPU), so that gathering, barriers,
data loaders and everything that others decide by it work as they do under DDP.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.nn.functional  # takes a reference to the default group into its signatures, if there is one
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather_object

from ourshard.config import Tier
from ourshard.integrations import dummies, ending, models
from ourshard.integrations.advising import advised
from ourshard.integrations.arguments import take_plugin
from ourshard.integrations.joining import JoiningMixin
from ourshard.integrations.optimizer import ShardOptimizer, refuse_fused_backward, unscale_once, with_sharding
from ourshard.integrations.plugin import ShardPlugin
from ourshard.integrations.saving import SavingMixin
from ourshard.offload.preflight import why_not
from ourshard.runtime import api, control
from ourshard.runtime.in_backward import NO_CLIPPING, NO_SCALING
from ourshard.runtime.scaler import ShardGradScaler
from ourshard.runtime.step_hooks import add_hooks
from ourshard.runtime.wording import counted

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object

logger = logging.getLogger("ourshard")


class ShardAcceleratorMixin(SavingMixin, JoiningMixin, _Base):
    """What differs from accelerate when models are sharded by ourshard."""

    is_ourshard = True  # how the wraps of other packages know that they are to act
    ourshard_plugin: ShardPlugin

    def __init__(self, *args: Any, ourshard_plugin: ShardPlugin | None = None, **kwargs: Any) -> None:
        self.ourshard_plugin = take_plugin(ourshard_plugin, kwargs)
        if _alone_on_cpus() and len(args) <= 4 and "cpu" not in kwargs:
            kwargs["cpu"] = True
        super().__init__(*args, **kwargs)
        if self.ourshard_plugin.config.checkpoint.save_on_each_node:
            self.project_configuration.save_on_each_node = True
        self._check_world()
        self._check_engines()
        self._check_disk()
        self.state.ourshard_plugin = self.ourshard_plugin
        self._use_agreeing_scaler()
        ending.watch()

    def _check_world(self) -> None:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and self.num_processes == 1:
            raise ValueError(
                f"A launcher started {counted(launched, 'process')}, but accelerate's state was made for one, before "
                "Accelerator() and without cpu=True, so each would train alone. Create the Accelerator first, or "
                "PartialState(cpu=True), or set ACCELERATE_USE_CPU=true."
            )

    def _check_engines(self) -> None:
        kind = self.distributed_type
        if kind != DistributedType.NO and not kind.value.startswith("MULTI_"):
            raise ValueError(
                f"ourshard shards data-parallel training; it cannot run with distributed_type {kind.value}."
            )
        if getattr(self.fp8_backend, "value", self.fp8_backend) == "MSAMP":
            raise ValueError(
                "fp8 with MS-AMP replaces the optimizer's step; use Transformer Engine or torchao with ourshard."
            )
        if self.ddp_handler is not None and self.ddp_handler.comm_hook.value != "no":
            raise ValueError(
                "DistributedDataParallelKwargs: comm_hook belongs to DDP; set communication.gradients in the ourshard "
                "config instead."
            )
        models.check_parallelism(self.parallelism_config)

    def _check_disk(self) -> None:
        """Refuse on all ranks a folder that is no use to any, before a model is loaded. Its space needs the model."""
        folder = self.ourshard_plugin.config.offload.nvme_path
        if folder is not None and Tier.NVME in self.ourshard_plugin.config.offload.tiers:
            errors = [error for error in gather_object([why_not(Path(folder))]) if error]
            if errors:
                raise ValueError(errors[0])

    def _use_agreeing_scaler(self) -> None:
        """Replace the loss scaler by one whose overflow all ranks agree on; fp16 on CPUs gets one too."""
        if self.mixed_precision != "fp16":
            return
        kwargs = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        self.scaler = ShardGradScaler(self.device.type, **kwargs)
        self.native_amp = True

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, on CPUs too: accelerate asks this before it joins or validates."""
        return self.use_distributed and self.distributed_type.value.startswith("MULTI_")

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Shard `model` in place, then let accelerate add autocast, fp8 and compilation, but no DDP.

        A model that only evaluates is sharded too: it is the same object when training starts. Preparing a model again
        changes nothing (accelerate's own `find_executable_batch_size` does it), unless another config is asked for.
        """
        config = models.resolved(self.ourshard_plugin.config_for(models.inner(model)), self)
        if config.optimizer_in_backward:
            self._check_in_backward()
        models.shard_once(model, config, self)
        for optimizer in self._optimizers:
            api.adopt_optimizer(optimizer.optimizer)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _check_in_backward(self) -> None:
        """Refuse what has to look at all gradients before a step, where steps do not wait for all."""
        if self.scaler is not None:
            raise ValueError(NO_SCALING)
        if self.ourshard_plugin.gradient_clipping is not None:
            raise ValueError(f"gradient_clipping: {self.ourshard_plugin.gradient_clipping}: {NO_CLIPPING}")

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the objects; those that stand for what DeepSpeed makes of its config are made first."""
        return super().prepare(*dummies.made(args, self.ourshard_plugin.blocks), **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Let the scheduler step with the optimizer: once where it counts its steps, else once for each rank."""
        prepared = super().prepare_scheduler(scheduler)
        if dummies.counts_steps(scheduler):
            prepared.split_batches = True
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> ShardOptimizer:
        """Let the optimizer update this rank's masters. Its state lives where they do, so accelerate places nothing."""
        refuse_fused_backward(optimizer)
        add_hooks(optimizer)  # before anything keeps its step
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        prepared = with_sharding(prepared, self.ourshard_plugin.gradient_clipping, self._trained)
        api.adopt_optimizer(prepared.optimizer)
        return prepared

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for model in self._models for parameter in models.inner(model).parameters()]

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Accumulate the gradients of forwards made inside, as DDP's `no_sync` does."""
        engine = models.engine_of(model)
        with engine.no_sync() if engine is not None else super().no_sync(model):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
        """Sync in the next backward what forwards under `no_sync` left to accumulate."""
        engine = models.engine_of(model)
        if engine is None:
            yield
            return
        before, engine.sync_backward = engine.sync_backward, True
        try:
            yield
        finally:
            engine.sync_backward = before

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward; an out-of-memory error says what would fit, and the model can be used again."""
        with advised(in_backward=True):
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale, once a step, so that clipping model after model works."""
        if self.scaler is None:
            return
        given: Any = self._optimizers if optimizer is None else optimizer
        for opt in given if isinstance(given, (list, tuple)) else [given]:
            unscale_once(self.scaler, opt.optimizer if isinstance(opt, AcceleratedOptimizer) else opt)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip by the norm over all ranks; return it, the same tensor value on all."""
        norm: torch.Tensor = self._clip("norm", _listed(parameters), max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients."""
        self._clip("value", _listed(parameters), clip_value)

    def wait_for_everyone(self) -> None:
        """Wait for the other ranks, and let them know of it should they wait for something else."""
        with control.waiting("accelerator.wait_for_everyone"):
            super().wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all ranks; as `wait_for_everyone`."""
        with control.waiting("accelerator.gather"):
            return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors of all ranks; as `wait_for_everyone`."""
        with control.waiting("accelerator.reduce"):
            return super().reduce(tensor, reduction, scale)

    def free_memory(self, *objects: Any) -> Any:
        """Drop what engines hold between a forward and a step, also after an exception; then let go of the objects."""
        for model in (*self._models, *objects):
            engine = models.engine_of(model)
            if engine is not None:
                engine.reset()
        return super().free_memory(*objects)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the class that was asked for: the one handed out has no name to be found by."""
        return _restore, (type(self).__bases__[1],), dict(self.__dict__)


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _alone_on_cpus() -> bool:
    """Return whether a launcher started several processes on a machine without an accelerator.

    Stock accelerate then trains one model in each, side by side, unless it is told `cpu=True`.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    if not several or torch.accelerator.is_available() or PartialState._shared_state:
        return False
    if os.environ.get("LOCAL_RANK") == "0" and not os.environ.get("ACCELERATE_USE_CPU"):
        logger.warning("No accelerator was found: the processes train together on CPUs, over gloo.")
    return True


@functools.cache
def sharded_class(cls: type) -> type:
    """Return the sharded subclass of `Accelerator` or of a user's subclass; a sharded class as it is."""
    if issubclass(cls, ShardAcceleratorMixin):
        return cls
    return type(f"Shard{cls.__name__}", (ShardAcceleratorMixin, cls), {"__module__": cls.__module__})


def _restore(cls: type) -> Any:
    return object.__new__(sharded_class(cls))
