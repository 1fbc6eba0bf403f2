"""What a Trainer evaluates on several ranks, as one process would; each function stands around a method of the Trainer.

Note [An uneven last batch]
---------------------------
Where rows don't suffice for the last batch of all ranks, accelerate fills it up with rows that were there before, and
drops from what is gathered all but the first `remainder` rows. The loss of a rank is a mean that has the filled-up rows
in it, so `eval_loss` would be another one than in one process, and with it the best model. Therefore this batch's loss
is computed once more, over its own rows, with the items counted anew; all ranks give their part, and all get the mean.
A rank without rows of its own runs one row, for the others need its part of the weights, and counts it as nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ourshard.integrations.trainer_loss import Count, items_of

Method = Callable[..., Any]
Inputs = dict[str, Any]


def evaluation_loop(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop the rows that fill up an uneven last batch. `Seq2SeqTrainer` keeps them, and counts them in metrics."""
    if trainer.gather_function == trainer.accelerator.gather:
        trainer.gather_function = trainer.accelerator.gather_for_metrics
    with ExitStack() as stack:
        stack.enter_context(_around(trainer, "compute_loss", _loss_of_own_rows))
        if getattr(trainer.args, "predict_with_generate", False):
            stack.enter_context(_around(trainer, "prediction_step", _generate_with_joint_loss))
        return method(trainer, *args, **kwargs)


@contextmanager
def _around(trainer: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Put `around(trainer, method, ...)` in the place of a method of this Trainer, of whatever class it is."""
    kept = vars(trainer).get(name)
    setattr(trainer, name, functools.partial(around, trainer, getattr(trainer, name)))
    try:
        yield
    finally:
        if kept is None:
            delattr(trainer, name)
        else:
            setattr(trainer, name, kept)


def _loss_of_own_rows(
    trainer: Any,
    method: Method,
    model: torch.nn.Module,
    inputs: Inputs,
    return_outputs: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the loss of an uneven last batch over its own rows: Note [An uneven last batch]."""
    rows = _own_rows(trainer, model, inputs)
    kept = dict(inputs)  # the Trainer takes labels out of it
    result = method(model, inputs, return_outputs=return_outputs, **kwargs)
    if rows is None:
        return result
    used = list[str]()
    own, accelerator = _cut(kept, rows), trainer.accelerator
    items = trainer._get_num_items_in_batch([own], trainer.args.device)
    if "num_items_in_batch" in kwargs:
        kwargs["num_items_in_batch"] = None if items is None else Count.of(items, used)
    with torch.compiler.set_stance("force_eager"):  # a trace would not see the count's class
        loss = method(model, _cut(kept, max(1, rows)), return_outputs=True, **kwargs)[0].detach().mean()
    joint = bool(used) and trainer.args.average_tokens_across_devices
    # A loss that used the count is this rank's part of a mean over all items, times the number of ranks.
    weight = 1.0 if joint else rows * accelerator.num_processes / accelerator.gradient_state.remainder
    part = loss * weight if rows else torch.zeros_like(loss)
    loss = accelerator.reduce(part, "mean")
    return (loss, result[1]) if return_outputs else loss


def _generate_with_joint_loss(
    trainer: Any, method: Method, model: torch.nn.Module, inputs: Inputs, prediction_loss_only: bool, **kwargs: Any
) -> Any:
    """Let the loss beside generated tokens be the mean over the items of all ranks, not of each rank."""
    loss, *others = method(model, inputs, prediction_loss_only, **kwargs)
    if loss is None or prediction_loss_only or "labels" not in inputs:
        return loss, *others
    rows = _own_rows(trainer, model, inputs)
    own = inputs if rows is None else _cut(inputs, rows)
    if rows is not None:
        loss = _plain_loss(trainer, model, trainer._prepare_inputs(_cut(inputs, max(1, rows))))
    items = items_of(trainer, own).to(loss.device)
    part = loss * items if items else torch.zeros_like(loss)
    joint = trainer.accelerator.reduce(part, "sum") / trainer.accelerator.reduce(items, "sum")
    return joint, *others


def _plain_loss(trainer: Any, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad(), trainer.compute_loss_context_manager():
        outputs = model(**inputs)
    if trainer.label_smoother is not None:
        return trainer.label_smoother(outputs, inputs["labels"]).detach().mean()
    return (outputs["loss"] if isinstance(outputs, dict) else outputs[0]).detach().mean()


def _own_rows(trainer: Any, model: torch.nn.Module, inputs: Inputs) -> int | None:
    """Return how many rows of an uneven last batch are this rank's own; None for any other batch.

    Collective in an uneven last batch: None on all ranks where one of them has inputs that are not all cut by rows.
    """
    state = trainer.accelerator.gradient_state
    if model.training or trainer.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return None
    lengths = {len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()}
    nested = any(isinstance(value, (dict, list, tuple)) for value in inputs.values())
    rows = -1 if nested or len(lengths) != 1 else lengths.pop()
    if _has_loss_of_its_own(trainer) and rows != trainer.args.eval_batch_size:
        rows = -1  # its rows need not be those of the data set: pairs, say, lie behind each other
    sizes = torch.tensor([rows], device=trainer.args.device)
    told = trainer.accelerator.gather(sizes).unique().tolist()  # on all ranks, also where this one has no such rows
    if rows < 0 or told != [rows]:
        return None
    before = trainer.accelerator.process_index * rows
    return max(0, min(rows, state.remainder - before))


def _has_loss_of_its_own(trainer: Any) -> bool:
    owner = next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))
    return owner.__module__ != "transformers.trainer"


def _cut(inputs: Inputs, rows: int) -> Inputs:
    return {
        name: value[:rows] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in inputs.items()
    }
