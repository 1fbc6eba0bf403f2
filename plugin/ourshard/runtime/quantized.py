"""Which quantized models can be sharded: those whose weights are plain tensors of codes."""

from __future__ import annotations

from typing import Any

from torch import nn

SHARDED = "bitsandbytes"


def why_not(quantizer: Any) -> str | None:
    """Return why a model that a quantizer of transformers made can't be sharded; None if it can."""
    config = quantizer.quantization_config
    method = getattr(config.quant_method, "value", config.quant_method)
    if method == SHARDED or getattr(config, "dequantize", False):
        return None
    unpacked = ", or load it with dequantize=True in its quantization_config" if hasattr(config, "dequantize") else ""
    return (
        f"its weights are quantized by {method!r}, and ourshard shards those of bitsandbytes (4 and 8 bits) alone. "
        f"Train adapters over a base that bitsandbytes quantizes{unpacked}; what is only evaluated may stay as it is, "
        "if it is not prepared."
    )


def refuse_quantized(model: nn.Module) -> None:
    """Raise `ValueError` if `model`, or a part of it, is quantized in a way that nobody has tried on shards."""
    for name, module in model.named_modules():
        quantizer = vars(module).get("hf_quantizer")
        problem = why_not(quantizer) if quantizer is not None else None
        if problem is not None:
            raise ValueError(f"{name or type(module).__name__!r} can't be sharded: {problem}")
