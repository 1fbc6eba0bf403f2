"""Ranks that wait for one another in different collectives, which no agreement precedes, say so within seconds.

Cases A08, D05 of CASES.md: calls under `if rank == 0`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.runtime import control

from tests.integrations.tiny import rows, tiny
from tests.integrations.trainer_runs import enable

pytestmark = pytest.mark.ranks


def train(accelerator: Any, model: Any, loss: torch.Tensor) -> None:
    accelerator.backward(loss)


def clip(accelerator: Any, model: Any, loss: torch.Tensor) -> None:
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def save(accelerator: Any, model: Any, loss: torch.Tensor) -> None:
    accelerator.backward(loss)
    accelerator.get_state_dict(model)


def wait(accelerator: Any, model: Any, loss: torch.Tensor) -> None:
    accelerator.backward(loss)
    accelerator.wait_for_everyone()


def skip(accelerator: Any, model: Any, loss: torch.Tensor) -> None:
    """Leave a batch out, as for a loss that is not finite."""


def part(first: Any, second: Any) -> None:
    """Train two steps, then one in which rank 0 calls one thing and rank 1 another, and begin the next."""
    from accelerate import Accelerator

    control.REPORT_AFTER = 0.2
    enable({"stage": 3, "persist_below": 50})
    accelerator = Accelerator()
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = rows()[:4]
    for action in (train, train, (first, second)[dist.get_rank()]):
        action(accelerator, model, torch.nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    model(inputs)


CASES = {
    "clips alone": (clip, train, "reduce of the gradient norm", "forward of Tiny (model 0) begins"),
    "skips a backward": (train, skip, "backward of Tiny (model 0) begins", "forward of Tiny (model 0) begins"),
    "waits alone": (train, wait, "forward of Tiny (model 0) begins", "accelerator.wait_for_everyone"),
    "saves while others wait": (save, wait, "state_dict", "accelerator.wait_for_everyone"),
}
QUICK = ("clips alone", "skips a backward")


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_a_call_on_one_rank_alone_is_an_error_that_names_where_all_are(ranks, case):
    first, second, of_first, of_second = CASES[case]
    ended = ranks(2, fresh=True)(part, first, second, timeout=60)
    assert all(code != 0 for code in ended.exitcodes), ended.stderr
    told = next(text for text in ended.stderr if "The ranks are in different places" in text)
    assert of_first in told.split("rank 0: ")[1].split("\n")[0]
    assert of_second in told.split("rank 1: ")[1].split("\n")[0]


def leave_out(what: str, config: dict[str, Any]) -> None:
    """Train four steps; on rank 1 one step is left out, or the loop is left."""
    from accelerate import Accelerator

    enable(config)
    accelerator = Accelerator()
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = rows()[:4]
    for number in range(4):
        alone = number == 1 and dist.get_rank() == 1
        if alone and what == "loop":
            break
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        if not alone:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_one_rank_leaves_out_is_an_error(ranks, stage):
    """Its rows would be of other weights than those of the others, from then on."""
    ended = ranks(2, fresh=True)(leave_out, "step", {"stage": stage, "persist_below": 50}, timeout=60)
    assert all(code != 0 for code in ended.exitcodes), ended.stderr
    for told in ended.stderr:
        assert re.search(r"rank 0: .*, step 2\n", told), told
        assert re.search(r"rank 1: .*, step 1\n", told), told


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_came_to_its_end_is_named_by_those_that_wait_for_it(ranks, stage):
    """D02: a loop with fewer batches on one rank, whose script then ends without an error."""
    ended = ranks(2, fresh=True)(leave_out, "loop", {"stage": stage, "persist_below": 50}, timeout=60)
    assert ended.exitcodes[0] != 0
    assert ended.exitcodes[1] == 0, ended.stderr[1]
    told = ended.stderr[0].strip().splitlines()[-1]
    assert "Rank 1 came to the end of the script, and rank 0 waits in: " in told
    assert "step 1. Every rank must run as many batches" in told
