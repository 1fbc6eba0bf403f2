"""An optimizer with state of 8 bits in blocks of 256 elements, in torch alone, as those of bitsandbytes keep it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

BLOCK = 256
TABLE = torch.linspace(-1, 1, 256).pow(3)  # finer near zero


class EightBits(Optimizer):
    """SGD whose momentum is codes, a scale a block, and the table of what codes stand for; fp32 for small tensors."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group["lr"])

    def _step(self, parameter: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", 0) + 1
        if parameter.numel() < BLOCK:
            momentum = state.setdefault("codes", torch.zeros_like(parameter))
            parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=lr)
            return
        momentum = decoded(state) if "scales" in state else torch.zeros(parameter.numel())
        momentum = momentum.mul_(0.9).add_(parameter.grad.reshape(-1))
        state.update(encoded(momentum), codes_table=TABLE.clone())
        state["codes"] = state["codes"].view(parameter.shape)
        parameter.sub_(momentum.view_as(parameter), alpha=lr)


def decoded(state: dict[str, Any]) -> torch.Tensor:
    """Return what the codes stand for, flat."""
    codes = state["codes"].reshape(-1)
    scales = state["scales"].repeat_interleave(BLOCK)[: codes.numel()]
    return state["codes_table"][codes.long()] * scales


def encoded(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes and scales of flat values."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp_min(1e-30)
    middles = (TABLE[1:] + TABLE[:-1]) / 2
    codes = torch.bucketize(blocks / scales[:, None], middles).to(torch.uint8)
    return {"codes": codes.view(-1)[: values.numel()].clone(), "scales": scales}


class Coded(torch.Tensor):
    """Codes, scales and table as one tensor, by torch's protocol, as torchao keeps them; nothing can be done to it."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, codes_table: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, codes_table: torch.Tensor) -> None:
        self.inner = {"codes": codes, "scales": scales, "codes_table": codes_table}

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["inner"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __tensor_flatten__(self) -> Any:
        return list(self.inner), {"block": BLOCK, "dtype": torch.float32}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Any:
        assert context == {"block": BLOCK, "dtype": torch.float32}
        assert tuple(outer_size) == inner["codes"].shape
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


class OfClass(EightBits):
    """Keeps them so."""

    def _step(self, parameter: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        plain = {key: value for key, value in state.items() if key != "momentum"}
        plain |= state["momentum"].inner if "momentum" in state else {}
        super()._step(parameter, plain, lr)
        if "scales" in plain:
            plain["momentum"] = Coded(*(plain.pop(key) for key in ("codes", "scales", "codes_table")))
        state.update(plain)
