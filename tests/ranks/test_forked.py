"""Processes that a rank forks: workers of multiprocessing, and what `os.fork` makes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integrations.tiny import rows, tiny
from tests.integrations.trainer_runs import enable

WHOLE = {"forward", "evaluation", "state_dict"}  # no other rank has a part in them where parameters are whole

pytestmark = pytest.mark.ranks


def exit_code_of(action: Callable[[], object]) -> int:
    """Fork, do something in the new process as a script would that goes on to its end, and return how that ended."""
    process = os.fork()
    if process == 0:
        action()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def told(action: Callable[[], object]) -> str:
    """Return the error that something ends in when a forked process does it."""

    def tell() -> None:
        try:
            action()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)

    read, write = os.pipe()
    exit_code_of(tell)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as said:
        return said.read()


def fail() -> None:
    raise KeyError("of the forked process")


def train_another() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def sleep(began: Any) -> None:
    began.set()
    time.sleep(3600)


def train(stage: int) -> dict[str, object]:
    """Train a step before and after other processes were forked."""
    import ourshard
    from accelerate import Accelerator
    from ourshard.runtime import control

    def step() -> None:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()

    enable({"stage": stage, "persist_below": 50})
    accelerator = Accelerator()
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = rows()[:4]
    step()
    ourshard.asked_to_end()
    found: dict[str, object] = {
        "ends": exit_code_of(lambda: None),
        "fails": exit_code_of(fail),
        "trains": exit_code_of(train_another),
        "forward": told(lambda: model(inputs)),
        "evaluation": told(lambda: model.eval()(inputs)),
        "gather": told(lambda: accelerator.gather(inputs)),
        "barrier": told(accelerator.wait_for_everyone),
        "state_dict": told(lambda: accelerator.get_state_dict(model)),
        "save": told(lambda: accelerator.save_state("nowhere")),
    }
    forking = multiprocessing.get_context("fork")
    began = forking.Event()
    worker = forking.Process(target=sleep, args=(began,))
    worker.start()
    began.wait()
    worker.terminate()
    worker.join(20)
    found["terminated"] = worker.exitcode
    worker.kill()
    watch = control.watch()
    assert watch is not None
    found["words"] = watch.last_words.account()
    step()
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forked_process_ends_as_any_other_and_is_refused_what_takes_the_ranks_connections(ranks, stage: int):
    ended = ranks(2, fresh=True)(train, stage, timeout=120)
    assert ended.exitcodes == [0, 0], ended.stderr
    for found in ended.values:
        assert [found.pop(name) for name in ("ends", "fails", "trains", "terminated")] == [0, 1, 0, -15]
        words = found.pop("words")
        assert (words.failed, words.over) == ({}, ())
        refused = {what for what, said in found.items() if "was forked from process" in str(said)}
        assert refused == set(found) - (WHOLE if stage == 0 else set()), found
