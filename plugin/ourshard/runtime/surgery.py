"""Say whether torch is giving a module other parameters, which a sharded model can't follow."""

from __future__ import annotations

import sys

# Functions of torch that give a module other parameters, or take them back.
_SURGERY = {
    f"torch.nn.utils.{name}" for name in ("parametrizations", "parametrize", "prune", "spectral_norm", "weight_norm")
}
_SURGEONS = ("apply", "register_parametrization", "remove", "remove_parametrizations", "spectral_norm")


def in_surgery() -> bool:
    """Say whether a module is being parametrized or pruned."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _SURGERY and frame.f_code.co_name in _SURGEONS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
