"""Find out how an optimizer steps: each element by itself, each parameter by itself, or neither."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

TRIALS: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of small tensors made here, which nothing adopts
_PROBED: dict[Any, str | None] = {}


def needs_whole(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Say whether an optimizer needs whole parameters; raise `ValueError` if it can't step them one by one either."""
    why = probe(optimizer, group)
    if why is None:
        return False
    if steps_each_alone(type(optimizer)):
        return True
    if getattr(optimizer, "elementwise", None) is False:
        why = probe_apart(optimizer, group)
        if why is None:
            return True
    name, own = type(optimizer).__name__, _own_options(optimizer, group)
    of_group = f" in its group with {', '.join(own)}" if own else ""
    raise ValueError(
        f"The optimizer {type(optimizer).__module__}.{name} {why}{of_group}, but at this stage each rank holds some "
        "rows of each parameter. Use stage 0, or an optimizer that treats each element by itself (AdamW of torch, SGD, "
        "Lion, ...), or Adafactor or Muon. If it does "
        f"treat each element by itself, say so with `{name}.elementwise = True`; if it treats each parameter by "
        f"itself, and needs it whole, with `{name}.elementwise = False`."
    )


def steps_each_alone(kind: type[Optimizer]) -> bool:
    """Say whether a class is one of those known to need whole parameters, and to step each by itself."""
    return kind in (torch.optim.Adafactor, torch.optim.Muon) or (
        (kind.__module__, kind.__qualname__) == ("transformers.optimization", "Adafactor")
    )


def can_step_in_turns(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Say whether an optimizer that steps some of its parameters, and then the others, does what it does at once.

    One that counts its steps for all parameters together does not. Tried on small tensors.
    """
    kind, options, own = type(optimizer), _constructor_options(optimizer, group), _own_options(optimizer, group)
    (first, *grads), (second, *others) = _tensors(0), _tensors(1)
    both = list(zip(grads, others, strict=True))
    try:
        at_once = _stepped(kind, options, own, [first, second], both)
        in_turns = _stepped(kind, options, own, [first, second], both, in_turns=True)
    except Exception:
        return False
    return all(map(torch.equal, at_once, in_turns))


def probe(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why an optimizer can't step flat pieces, or None if it can. Cached by class and options."""
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return None if declared else "says that it needs whole matrices"
    options, own = _constructor_options(optimizer, group), _own_options(optimizer, group)
    key = (type(optimizer), tuple(sorted((k, repr(v)) for k, v in {**own, **options}.items() if k != "lr")))
    if key not in _PROBED:
        _PROBED[key] = _probe(type(optimizer), options, own)
    return _PROBED[key]


def _constructor_options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that the optimizer's constructor takes; those that choose a kernel are left out."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    known = {key for key in optimizer.defaults if anything or key in accepted}
    return {k: v for k, v in group.items() if k in known and k not in ("fused", "foreach", "capturable")}


def _own_options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group says beyond the optimizer's defaults: GaLore and Apollo take a group with a `rank` apart."""
    known = {*optimizer.defaults, "params", "param_names", "initial_lr", "fused", "foreach", "capturable"}
    return {key: value for key, value in group.items() if key not in known}


def probe_apart(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why an optimizer can't step its parameters on several ranks, each whole on one, or None if it can."""
    kind, options, own = type(optimizer), _constructor_options(optimizer, group), _own_options(optimizer, group)
    (first, *grads), (second, *others) = _tensors(0), _tensors(1)
    both = list(zip(grads, others, strict=True))
    try:
        together = _stepped(kind, options, own, [first, second], both)
        one = _stepped(kind, options, own, [first, second], [(grad, None) for grad, _ in both])
        other = _stepped(kind, options, own, [first, second], [(None, grad) for _, grad in both])
    except Exception as problem:
        return f"could not be tried on small tensors ({type(problem).__name__}: {problem})"
    same = torch.allclose(together[0], one[0]) and torch.allclose(together[1], other[1])
    return None if same else "steps a parameter by what others have"


def _probe(kind: type[Optimizer], options: dict[str, Any], own: dict[str, Any]) -> str | None:
    value, *grads = _tensors(0)
    try:
        whole = _stepped(kind, options, own, [value], [[grad] for grad in grads])
    except Exception as problem:
        return f"could not be tried on small tensors ({type(problem).__name__}: {problem})"
    try:
        flat = _stepped(kind, options, own, _flat_pieces(value), [_flat_pieces(grad) for grad in grads])
    except Exception:
        return "needs whole matrices"
    same = torch.allclose(whole[0].reshape(-1), torch.cat(flat), rtol=1e-5, atol=1e-7)
    return None if same else "needs whole matrices"


def _tensors(seed: int) -> list[torch.Tensor]:
    """Return a matrix and the gradients of three steps."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 8, generator=generator, dtype=torch.float64, device="cpu").float() for _ in range(4)]


def _flat_pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [piece.reshape(-1) for piece in tensor.chunk(3)]


@torch.enable_grad()
def _stepped(
    kind: type[Optimizer],
    options: dict[str, Any],
    own: dict[str, Any],
    values: Sequence[torch.Tensor],
    steps: Sequence[Sequence[torch.Tensor | None]],
    *,
    in_turns: bool = False,
) -> list[torch.Tensor]:
    """Return `values` after some steps, with one gradient, or None, for each value in each step."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind([{"params": parameters, **own}], **options)  # type: ignore[call-arg]
    TRIALS.add(optimizer)
    if callable(train := getattr(optimizer, "train", None)):  # schedule-free optimizers step in this mode alone
        train()
    for grads in steps:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        for shown in [[each] for each in parameters] if in_turns else [parameters]:
            optimizer.param_groups[0]["params"][:] = shown
            optimizer.step()
    return [parameter.detach() for parameter in parameters]
