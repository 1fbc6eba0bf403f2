"""CUDA's autocast on tensors of any device: which operations run in 16 bits, and which in float32.

The lists are those of torch's documentation ("Automatic Mixed Precision package", CUDA Op-Specific Behavior); what is
not on them runs in the dtype of its inputs, promoted as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LOW: tuple[Callable[..., Any], ...] = (
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm, torch.Tensor.mm,
    torch.bmm, torch.Tensor.bmm, torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm, torch.addbmm,
    torch.addmv, torch.mv, torch.chain_matmul, torch.einsum, F.linear, F.conv1d, F.conv2d, F.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.prelu, F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
)  # fmt: skip
_WIDE: tuple[Callable[..., Any], ...] = (
    F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax,
    F.layer_norm, F.group_norm, F.local_response_norm, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.kl_div, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.cosine_similarity,
    F.softplus, F.softmin, F.hinge_embedding_loss, F.margin_ranking_loss,
    torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.log1p, torch.pow, torch.Tensor.pow,
    torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt, torch.reciprocal, torch.Tensor.reciprocal, torch.sum,
    torch.Tensor.sum, torch.prod, torch.Tensor.prod, torch.cumsum, torch.Tensor.cumsum, torch.cumprod, torch.norm,
    torch.Tensor.norm, torch.sinh, torch.cosh, torch.tan, torch.acos, torch.asin, torch.erfinv, torch.expm1,
    torch.renorm, torch.dist,
)  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Cast inputs as `torch.autocast("cuda", dtype)` does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._target: dict[Any, torch.dtype] = {**dict.fromkeys(_LOW, dtype), **dict.fromkeys(_WIDE, torch.float32)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = self._target.get(func)
        if target is None:
            return func(*args, **kwargs)
        return func(*(_cast(value, target) for value in args), **{key: _cast(v, target) for key, v in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
