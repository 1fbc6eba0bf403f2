"""Give a tensor object the content of another, while everyone who holds it goes on holding it."""

from __future__ import annotations

import weakref

import torch


def take_content(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Let `tensor` have the content of `twin`, of the same class and attributes, which is not used again.

    torch's own `swap_tensors` refuses tensors with weak references, as recurrent layers keep of their weights. They
    refer to the object, which stays, so that they stay right.
    """
    if weakref.getweakrefs(tensor):
        torch._C._swap_tensor_impl(tensor, twin)  # type: ignore[attr-defined]
    else:
        torch.utils.swap_tensors(tensor, twin)
