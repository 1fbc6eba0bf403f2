"""A rank that is gone ends the others in seconds, with an error that names it and says why (D05 of CASES.md).

No launcher ends these ranks: each has to find out by itself.
"""

from __future__ import annotations

import os
import signal
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ourshard.runtime.last_words import Account, LastWords

from tests.integrations.tiny import rows, tiny
from tests.integrations.trainer_runs import enable

pytestmark = pytest.mark.ranks


def end(how: str) -> None:
    """End rank 1."""
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("batch 42 is bad")


def train(place: str, how: str) -> None:
    """Train two steps; rank 1 ends at a place of the first or the second."""
    from accelerate import Accelerator
    from ourshard.runtime.unit import Unit

    enable({"stage": 3, "persist_below": 50})
    accelerator = Accelerator()
    if place == "before prepare":
        end(how)
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = rows()[:4]
    reduce = Unit._reduce
    for step in range(2):
        if step == 1 and place == "forward":
            model.blocks[1].register_forward_pre_hook(lambda *_: end(how))
        if step == 1 and place == "reduction":
            Unit._reduce = lambda unit: (end(how), reduce(unit))[1]  # type: ignore[assignment,method-assign]
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()


PLACES = {
    "before prepare": "comparing the configs of all ranks",
    "forward": "of Tiny (model 0)",
    "reduction": "reduce of blocks.1",
}


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("reduction", "killed"),
        ("forward", "failed"),
        ("before prepare", "failed"),
        pytest.param("before prepare", "killed", marks=pytest.mark.slow),
        pytest.param("forward", "killed", marks=pytest.mark.slow),
        pytest.param("reduction", "failed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_has_gone_is_named_with_the_reason(ranks, place: str, how: str):
    ended = ranks(2, fresh=True)(train, place, how, timeout=60)
    assert ended.exitcodes[0] == 1, ended.stderr[0]
    told = ended.stderr[0].strip().splitlines()[-1]
    assert PLACES[place] in told, told
    wanted = "Rank 1 does not answer" if how == "killed" else "Rank 1 ended with KeyError: 'batch 42 is bad'"
    assert f"LostRankError: {wanted}, and rank 0 waits in: " in told, told


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (Account((), {2: "KeyError: 'x'"}, ()), "Rank 2 ended with KeyError: 'x', and rank 0 waits."),
        (Account((1,), {3: "E: a", 2: "E: b"}, ()), "Rank 2 ended with E: b (2 ranks failed), and rank 0 waits."),
        (Account((), {}, (1, 3)), "Rank 1 and rank 3 do not answer"),
        (Account((), {}, ()), "All ranks are there"),
    ],
)
def test_what_is_known_of_the_others_is_said(account: Account, words: str):
    assert words in account.told("rank 0 waits")


def test_a_signal_in_the_middle_of_the_last_words_does_not_silence_them() -> None:
    """A DataLoader's handler raises when it hears that a worker was killed, by which a rank may have ended."""
    store = Mock(check=Mock(side_effect=[RuntimeError("DataLoader worker is killed by signal"), False]))
    LastWords(store, 1, 2).say(ConnectionResetError("Connection reset by peer"))
    store.set.assert_called_once_with("end/1", "ConnectionResetError: Connection reset by peer")
