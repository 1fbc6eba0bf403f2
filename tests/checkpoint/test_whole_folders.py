"""Folders of a whole `save_state` under ourshard, read, converted and loaded as any other: X04, I11."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint import convert, detect, verify
from ourshard.checkpoint.source import PARAM, TensorKey

from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import joined, part

pytestmark = pytest.mark.ranks


def prepared(form: str) -> tuple[Any, list[Any]]:
    """Return two models, one loaded in 16 bits, and two optimizers, the first for both."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from ourshard import ShardPlugin

    AcceleratorState._reset_state(True)
    config = {"stage": 3, "persist_below": 20, "checkpoint": {"format": form}}
    accelerator = Accelerator(cpu=True, ourshard_plugin=ShardPlugin(config))
    models = [toy(), toy().to(torch.bfloat16)]
    second = list(models[1].parameters())
    optimizers = [torch.optim.AdamW([*models[0].parameters(), *second[:2]]), torch.optim.Adam(second[2:])]
    return accelerator, list(accelerator.prepare(*models, *optimizers))


def train(things: list[Any], step: int) -> None:
    for model in things[:2]:
        batch = part(joined(step)).to(next(model.parameters()).dtype)
        square_loss(model, batch).backward()
    for optimizer in things[2:]:
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: str) -> None:
    """Save the same twice, whole and by rows."""
    for form in ("full", "sharded"):
        accelerator, things = prepared(form)
        torch.manual_seed(0)
        train(things, 0)
        train(things, 1)
        accelerator.save_state(f"{folder}/{form}")
        accelerator.wait_for_everyone()


def goes_on(number: int, out: str) -> dict[str, torch.Tensor]:
    """Load one model from what was converted, and return its weights."""
    import ourshard

    _, things = prepared("full")
    ourshard.load(things[number], None, out)
    return ourshard.full_state_dict(things[number])


def test_a_whole_save_has_what_rows_have_and_is_converted_with_it(ranks: Any, tmp_path: Path) -> None:
    """Its optimizer was left out without a word."""
    ranks(2)(saved, str(tmp_path))
    for number in range(2):
        with (
            detect(tmp_path / "full", model=number) as whole,
            detect(tmp_path / "sharded", model=number) as rows,
        ):
            assert whole.tensors.keys() == rows.tensors.keys()
            assert any(key.is_state for key in rows.tensors)
            for key in rows.tensors:
                assert torch.equal(whole.read(key), rows.read(key)), key
        report = convert(tmp_path / "full", tmp_path / f"out{number}", to="ourshard", model=number)
        assert not any("optimizer" in loss for loss in report.losses)
        with detect(tmp_path / f"out{number}") as source, detect(tmp_path / "full", model=number) as whole:
            assert verify(source, against=whole).ok
            weight = next(key for key in source.tensors if key.kind == PARAM)
            wanted = source.read(TensorKey(PARAM, weight.name))
        for found in ranks(3)(goes_on, number, str(tmp_path / f"out{number}")):
            assert torch.equal(found[weight.name], wanted.to(found[weight.name].dtype))
