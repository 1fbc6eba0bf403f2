"""What a Trainer counts wrong on several ranks, put right; each function stands around the method of its name.

Note [Ignored counts]
---------------------
The Trainer hands `num_items_in_batch`, the items of all ranks and micro-batches, to every model whose forward takes
keyword arguments, and multiplies the loss by the number of ranks: the mean over ranks then is the mean over items. A
model that does not look at the count (T5, BART, BERT: their losses are means of the batch they see), a label smoother
before transformers 5.24, or a `compute_loss_func` that takes a mean, so gets a loss and gradients that grow with the
ranks and with the accumulation steps. Therefore the first forward, which is not compiled,
gets a count that knows whether it was used. Where it was not, the loss is weighted by the share that its batch has in
the count: a mean over the batch's items so becomes a part of the mean over all, whatever the ranks' and micro-batches'
sizes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("ourshard")

Method = Callable[..., Any]

_USES_COUNT: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by Trainer, once a forward has shown

# What hands a tensor on, or asks what it is like, without using its value.
_HANDS_ON = ("to", "float", "long", "clone", "detach", "contiguous", "view", "reshape", "cpu", "cuda")
_LOOKS = ("is_floating_point", "is_complex", "dim", "size", "numel", "element_size", "is_contiguous", "data_ptr")


class Count(torch.Tensor):
    """A number of items that notes when its value is used; `used` is a list that has an entry then."""

    used: list[str]

    @staticmethod
    def of(number: Any, used: list[str]) -> Count:
        value = number if isinstance(number, torch.Tensor) else torch.tensor(number, device="cpu")
        count = torch.Tensor._make_subclass(Count, value)
        count.used = used
        return count

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        name = function.__name__
        count = next((argument for argument in args if isinstance(argument, Count)), None)
        if count is None or name in ("__get__", *_LOOKS):
            return result
        if name in _HANDS_ON:
            return Count.of(result, count.used)
        count.used.append(name)
        return result


def compute_loss(  # noqa: PLR0917 - the Trainer's own parameters
    method: Method,
    trainer: Any,
    model: torch.nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Weight a loss that ignores the count: Note [Ignored counts]."""
    items = num_items_in_batch
    if items is None or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return method(trainer, model, inputs, return_outputs, items)
    kept = dict(inputs)  # labels are taken out of it for a label smoother and for `compute_loss_func`
    if trainer in _USES_COUNT:
        result = method(trainer, model, inputs, return_outputs, items)
    else:
        used = list[str]()
        with torch.compiler.set_stance("force_eager"):  # a trace would not see the count's class
            result = method(trainer, model, inputs, return_outputs, Count.of(items, used))
        _USES_COUNT[trainer] = bool(used)
        _say(trainer)
    if _USES_COUNT[trainer]:
        return result
    share = items_of(trainer, kept) / items
    if model.training:
        share = share * trainer.accelerator.gradient_accumulation_steps  # `backward` divides by it: 1 since 5.24
    return (result[0] * share, result[1]) if return_outputs else result * share


def items_of(trainer: Any, inputs: dict[str, Any]) -> Any:
    """Count the items of one micro-batch as the Trainer counts them in the batches of a step."""
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if getattr(trainer, "_loss_shifts_labels", False) else inputs["labels"]
    return labels.ne(-100).sum()


def _say(trainer: Any) -> None:
    if not _USES_COUNT[trainer] and trainer.args.process_index == 0:
        model = trainer.accelerator.unwrap_model(trainer.model)
        name = "compute_loss_func" if trainer.compute_loss_func is not None else type(model).__name__
        logger.info(
            "%s takes num_items_in_batch and does not use it; its loss is weighted by each batch's share of it.", name
        )
