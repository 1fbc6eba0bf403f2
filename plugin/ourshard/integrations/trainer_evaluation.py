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

from collections.abc import Callable
from typing import Any

import torch

Method = Callable[..., Any]
Loss = Callable[[dict[str, Any], Any], torch.Tensor]  # of inputs and a number of items


def evaluation_loop(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop the rows that fill up an uneven last batch. `Seq2SeqTrainer` keeps them, and counts them in metrics."""
    if trainer.gather_function == trainer.accelerator.gather:
        trainer.gather_function = trainer.accelerator.gather_for_metrics
    return method(trainer, *args, **kwargs)


def own_rows(trainer: Any, model: torch.nn.Module, inputs: dict[str, Any]) -> int | None:
    """Return how many rows of an uneven last batch are this rank's own; None for any other batch.

    Collective in an uneven last batch: None on all ranks where one of them has inputs that are not all cut by rows.
    """
    state = trainer.accelerator.gradient_state
    if model.training or trainer.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return None
    lengths = {len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()}
    nested = any(isinstance(value, (dict, list, tuple)) for value in inputs.values())
    rows = -1 if nested or len(lengths) != 1 else lengths.pop()
    sizes = torch.tensor([rows], device=trainer.args.device)
    told = trainer.accelerator.gather(sizes).unique().tolist()  # on all ranks, also where this one has no such rows
    if rows < 0 or told != [rows]:
        return None
    before = trainer.accelerator.process_index * rows
    return max(0, min(rows, state.remainder - before))


def loss_of_rows(trainer: Any, loss_of: Loss, inputs: dict[str, Any], rows: int) -> torch.Tensor:
    """Return the loss of the first `rows` rows of each rank, over all: Note [An uneven last batch]. Collective."""
    items = trainer._get_num_items_in_batch([_cut(inputs, rows)], trainer.args.device)
    loss = loss_of(_cut(inputs, max(1, rows)), items).detach().mean()
    accelerator = trainer.accelerator
    if items is not None and trainer.args.average_tokens_across_devices:
        weight = 1.0  # the loss is this rank's part of a mean over all items, times the number of ranks
    else:
        weight = rows * accelerator.num_processes / accelerator.gradient_state.remainder
    part = loss * weight if rows else torch.zeros_like(loss)
    total: torch.Tensor = accelerator.reduce(part, "mean")
    return total


def _cut(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    return {
        name: value[:rows] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in inputs.items()
    }
