"""What is done to TRL when it has been imported.

Weights on their way to vLLM are whole: TRL gathers parameters under DeepSpeed and FSDP, and reads them as they are
under all else. A version that keeps this elsewhere is left as it is: parameters that are sharded say so when they are
read. And a model that is its own reference is sharded before it computes what `precompute_ref_log_probs` keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ourshard.integrations import models
from ourshard.integrations.exporting import Named, iter_full_parameters


def vllm_generation(module: ModuleType) -> None:
    """Let `VLLMGeneration` hand out whole weights of a sharded model."""
    cls: Any = getattr(module, "VLLMGeneration", None)
    method = getattr(cls, "_iter_named_params", None)
    if method is None or not hasattr(cls, "_fix_param_name_to_vllm"):
        return

    @functools.wraps(method)
    def iter_named_params(generation: Any) -> Named:
        sharded = models.engine_of(generation.model) is not None
        return _whole(generation) if sharded else method(generation)

    cls._iter_named_params = iter_named_params


def preference_trainer(module: ModuleType) -> None:
    """Shard the model of a DPO or KTO trainer before the constructor runs it, as its own reference.

    Under DDP the Trainer has moved it to the GPU by then. Here it is on the host, if its values are read at all.
    """
    for name in ("DPOTrainer", "KTOTrainer"):
        cls: Any = vars(module).get(name)
        if hasattr(cls, "_precompute_ref_logps"):
            cls._precompute_ref_logps = _on_shards(cls._precompute_ref_logps)


def _on_shards(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def precompute(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(trainer.accelerator, "is_ourshard", False)
        if ours and trainer.ref_model is None and models.engine_of(trainer.model) is None:
            trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        return method(trainer, *args, **kwargs)

    return precompute


def _whole(generation: Any) -> Named:
    """Yield (name, whole weight), adapters added. Collective: every rank goes through all of them."""
    model = models.inner(generation.model)
    for name, value in iter_full_parameters(model, merge_adapters=True):
        yield generation._fix_param_name_to_vllm(name), value.to(generation.accelerator.device)
