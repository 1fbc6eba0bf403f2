"""Gradients that autograd brings to what the user holds, where a leaf computes in its place.

Note [Stray gradients]
----------------------
The graph of a forward leads to leaves: modules hold them, and torch functions that meet a handle take the leaf. Two
ways lead to the user's own parameter instead:
* `torch.autograd.Function.apply` asks no torch function, so a handle that is given to one is what the graph knows,
  though all that is computed inside takes the leaf. What autograd puts on the handle, where nobody looks, is taken off.
* A whole parameter whose master has another dtype than its leaf is a plain tensor, which anyone may compute with (a
  penalty on weights), and shows the reduced gradient. Autograd would add this rank's to it; it is caught before.
Both are added to the leaf's gradient, and reduced with it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ourshard.runtime.handle import GET_GRAD, SET_GRAD, ShardParameter

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from ourshard.runtime.lane import Lane


class StrayGradients:
    """What catches the stray gradients of one lane: Note [Stray gradients]."""

    def __init__(self, lane: Lane) -> None:
        self._lane = weakref.proxy(lane)
        # Autograd keeps a parameter's node only while someone has it. A node keeps its parameter, in a way that the
        # garbage collector can't see: not for handles, which keep the lane.
        self._nodes: dict[int, Node] = {}

    def watch(self) -> None:
        """Catch the gradients of all parameters that need one. Again, where a new dtype gave them new nodes."""
        for position, parameter in enumerate(self._lane.resting):
            if isinstance(parameter, ShardParameter):
                with torch._C.DisableTorchFunctionSubclass():
                    parameter._post_accumulate_grad_hooks = OrderedDict({0: partial(_take_off, self._lane, position)})
            elif parameter.requires_grad:
                self._watch_node(position, get_gradient_edge(parameter).node)

    def _watch_node(self, position: int, node: Node) -> None:
        if node is not self._nodes.get(position):
            self._nodes[position] = node
            node.register_prehook(partial(_catch, self._lane, position))


@torch.no_grad()
def _take_off(lane: Lane, position: int, handle: nn.Parameter) -> None:
    """Run after autograd has put a gradient on a handle, past the property of that name."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = GET_GRAD(handle)
        SET_GRAD(handle, None)
    if gradient is not None:
        _give_leaf(lane, position, gradient)


def _catch(lane: Lane, position: int, gradients: tuple[torch.Tensor | None, ...]) -> Any:
    """Run before autograd adds a gradient to a plain parameter, which then gets none."""
    (gradient,) = gradients
    if gradient is not None:
        _give_leaf(lane, position, gradient.detach())
    return (None,)


def _give_leaf(lane: Lane, position: int, gradient: torch.Tensor) -> None:
    leaf = lane.leaves[position]
    gradient = gradient.to(leaf.dtype, copy=True)
    before = GET_GRAD(leaf)
    SET_GRAD(leaf, gradient if before is None else before + gradient)
    lane.unit.engine.begin_backward()
