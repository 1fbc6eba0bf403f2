"""Operations of training steps, for the share of a device's peak that they reach.

Model FLOPs utilization counts what the model needs, not what was done: no recomputation (Chowdhery et al., 2022,
"PaLM", appendix B). A token costs 2 operations for each element of a weight that multiplies it in forward, 2 in
backward for the gradient of its input, and 2 for that of the weight, which a frozen one has not; and
12 x layers x width x length for the products of attention, which PaLM counts in full also where they are causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class Flops:
    """Counts tokens, and the operations of their forward and backward.

    Attributes:
        unknown: why the operations of this model can't be counted; empty if they can.
    """

    def __init__(self, model: nn.Module, per_token: float | None = None) -> None:
        self.unknown = ""
        self._weights, self._attention = per_token or 0.0, 0.0
        if per_token is not None:
            return
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        if any(getattr(config, name, None) for name in _EXPERTS):
            self.unknown = "a token passes some experts only, and which are not counted"
            return
        self._weights = _of_weights(model)
        layers, width = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "hidden_size"))
        self._attention = 12.0 * layers * width

    def of_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, float]:
        """Return tokens and operations of a forward with these arguments and its backward; 0 where there are none.

        Tokens are the elements of the first two dimensions, (rows, length), of the model's main input.
        """
        name = getattr(model, "main_input_name", "input_ids")
        given = kwargs.get(name, args[0] if args else None)
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            return 0, 0.0
        rows, length = given.shape[:2]
        return rows * length, rows * length * (self._weights + self._attention * length)


def _of_weights(model: nn.Module) -> float:
    """Return the operations of one token in all weights that multiply; a table that is looked up in does not."""
    weights: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            weights |= {id(weight): weight for weight in module._parameters.values() if weight is not None}
    used = [weight for weight in weights.values() if weight.dim() > 1]
    return float(sum(weight.numel() * (6 if weight.requires_grad else 4) for weight in used))
