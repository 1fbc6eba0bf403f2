"""DeepSpeed's `LRRangeTest` and `OneCycle`: the rate grows until training breaks, or cycles once around what held.

The arguments of a block come with DeepSpeed's names; `steps` counts the optimizer steps that were taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

RANGE_TEST: Mapping[str, Any] = {
    "lr_range_test_min_lr": 1e-3,
    "lr_range_test_step_size": 2000,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_staircase": False,
}
ONE_CYCLE: Mapping[str, Any] = {  # None: no default, or the same as in the first half
    "cycle_min_lr": None,
    "cycle_max_lr": None,
    "decay_lr_rate": 0.0,
    "cycle_first_step_size": 2000,
    "cycle_second_step_size": None,
    "cycle_first_stair_count": 0,
    "cycle_second_stair_count": None,
    "decay_step_size": 0,
    "cycle_momentum": True,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
}
_SECOND_BETA = 0.99  # of Adam while its momentum cycles


def range_rate(settings: Mapping[str, Any], steps: int) -> float:
    """Return the learning rate of a range test."""
    intervals = steps / int(settings["lr_range_test_step_size"])
    grown = math.floor(intervals) if settings["lr_range_test_staircase"] else intervals
    return float(settings["lr_range_test_min_lr"] * (1.0 + settings["lr_range_test_step_rate"] * grown))


def cycle_rate(settings: Mapping[str, Any], steps: int) -> float:
    """Return the learning rate of one cycle: up, down, and from then on falling below where it began."""
    low, high = settings["cycle_min_lr"], settings["cycle_max_lr"]
    after = _after(settings, steps)
    if after is None:
        return float(low + (high - low) * _height(settings, steps))
    return float(low / (1.0 + settings["decay_lr_rate"] * after))


def cycle_momentum(settings: Mapping[str, Any], steps: int) -> float:
    """Return Adam's first beta: it falls where the rate rises. Before the first step it is the least, as there."""
    low, high = settings["cycle_min_mom"], settings["cycle_max_mom"]
    after = _after(settings, steps)
    if steps == 0:
        return float(low)
    if after is None:
        return float(high - (high - low) * _height(settings, steps))
    return float(high * (1.0 + settings["decay_mom_rate"] * after))


def _halves(settings: Mapping[str, Any]) -> tuple[int, int]:
    first, second = settings["cycle_first_step_size"], settings["cycle_second_step_size"]
    return int(first), int(first if second is None else second)


def _after(settings: Mapping[str, Any], steps: int) -> float | None:
    """Return how far training is beyond the cycle, in intervals of its decay; None within it."""
    past = steps - sum(_halves(settings))
    if past <= 0:
        return None
    return past / settings["decay_step_size"] if settings["decay_step_size"] else 0.0


def _height(settings: Mapping[str, Any], steps: int) -> float:
    """Return the place between the least rate, 0, and the largest, 1; in stairs where a number of them is given."""
    first, second = _halves(settings)
    place = steps % (first + second)
    rises = place <= first
    height = place / first if rises else (first + second - place) / second
    stairs = settings["cycle_first_stair_count"]
    if not rises and settings["cycle_second_stair_count"] is not None:
        stairs = settings["cycle_second_stair_count"]
    return math.floor(height * stairs) / stairs if stairs else height


SETTINGS = {"LRRangeTest": RANGE_TEST, "OneCycle": ONE_CYCLE}
RATES = {"LRRangeTest": range_rate, "OneCycle": cycle_rate}


class CycleLR(LambdaLR):
    """A `LambdaLR` of one cycle that moves the momentum of an Adam, too."""

    def __init__(
        self, optimizer: Optimizer, factors: list[Callable[[int], float]], settings: Mapping[str, Any]
    ) -> None:
        self.settings = dict(settings)  # plain: it is saved with the scheduler
        super().__init__(optimizer, factors)

    def step(self, epoch: int | None = None) -> None:
        """Go on by one step."""
        super().step(epoch)
        if self.settings["cycle_momentum"]:
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (cycle_momentum(self.settings, self.last_epoch), _SECOND_BETA)
