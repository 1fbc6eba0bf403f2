"""FLOPs of single operations: torch's own formulas, and those of attention kernels that it has none for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call: 2 m n k for a matrix product, 0 for what is no product."""
    packet = getattr(func, "overloadpacket", func)
    if packet in _ATTENTION:
        return _attention_flops(args, kwargs, products=_ATTENTION[packet])
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


# Matrix products of shape (query x key x head) in each kernel: two in forward; five in backward, where the scores are
# computed again (Dao, 2023, "FlashAttention-2", section 3.1).
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}


def _attention_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any], products: int) -> int:
    first = 0 if products == 2 else 1  # the backward's first argument is the output's gradient
    query, key = args[first], args[first + 1]
    batch, heads, length, width = query.shape
    whole = 2 * products * batch * heads * length * key.shape[-2] * width
    causal = kwargs.get("is_causal", _argument(args, 4 if products == 2 else 7))
    return whole // 2 if causal else whole


def _argument(args: tuple[Any, ...], position: int) -> Any:
    return args[position] if len(args) > position else False


def is_attention(func: Any) -> bool:
    """Say whether an operation is a fused attention kernel."""
    return "_attention" in getattr(func, "__name__", "")
