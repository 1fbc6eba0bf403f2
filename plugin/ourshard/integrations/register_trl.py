"""What is done to TRL when it has been imported: weights on their way to vLLM are whole.

TRL gathers parameters under DeepSpeed and FSDP, and reads them as they are under all else. A version that keeps this
elsewhere is left as it is: parameters that are sharded say so when they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ourshard.integrations import models

Named = Iterator[tuple[str, torch.Tensor]]


def vllm_generation(module: ModuleType) -> None:
    """Let `VLLMGeneration` hand out whole weights of a sharded model."""
    cls: Any = getattr(module, "VLLMGeneration", None)
    method = getattr(cls, "_iter_named_params", None)
    if method is None or not hasattr(cls, "_fix_param_name_to_vllm"):
        return

    @functools.wraps(method)
    def iter_named_params(generation: Any) -> Named:
        sharded = models.engine_of(generation.model) is not None
        return _whole(method, generation) if sharded else method(generation)

    cls._iter_named_params = iter_named_params


def _whole(method: Callable[[Any], Named], generation: Any) -> Named:
    """Yield (name, whole weight). Collective: every rank goes through all of them.

    Adapters are merged while all weights are whole, as under DeepSpeed; without adapters one lane is whole at a time.
    """
    from ourshard.runtime import api

    model = models.inner(generation.model)
    if hasattr(model, "peft_config"):
        with api.gathered(model):
            yield from method(generation)
        return
    for name, value in api.iter_full_parameters(model):
        yield generation._fix_param_name_to_vllm(name), value.to(generation.accelerator.device)
