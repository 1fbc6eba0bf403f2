"""`ShardEMACallback`: the average of a sharded run is that of one process, and training does not see it (I03)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.trainer_callbacks import ShardEMACallback
from safetensors.torch import load_file

from tests.integrations.trainer_runs import ROWS, Case, Tokens, arguments, enable, llama, quiet


def train(folder: str, shard: dict[str, Any] | None, world: int, ema: bool, **more: Any) -> dict[str, list[float]]:
    """Train with an average of decay 0.5; return the logged losses, of evaluation too."""
    from transformers import Trainer

    quiet()
    enable(shard)
    # Two sets of 8 rows with no mask: any batches.
    sets = {name: torch.utils.data.Subset(Tokens(50, seed), range(0, 50, 7)) for name, seed in (("a", 1), ("b", 2))}
    resume = more.pop("resume", None)
    trainer = Trainer(
        model=llama(),
        args=arguments(Case(), Path(folder), world, lr_scheduler_type="constant", **more),
        train_dataset=Tokens(ROWS),
        eval_dataset=sets,
        callbacks=[ShardEMACallback(0.5, evaluate=True)] if ema else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    return {name: [log[name] for log in logs if name in log] for name in NAMES}


NAMES = ("loss", "eval_a_loss", "eval_b_loss")


def ranked(folder: str, stage: int, ema: bool = True, **more: Any) -> dict[str, list[float]]:
    return train(folder, {"stage": stage, "persist_below": 64}, 2, ema, **more)


@pytest.mark.ranks
def test_the_average_is_that_of_one_process_and_is_evaluated_saved_and_resumed(ranks: Any, tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    alone = ranks(1)(train, str(tmp_path / "alone"), None, 1, True, **evaluated)[0]
    expected = load_file(tmp_path / "alone" / "ema.safetensors")
    saving = {"save_strategy": "steps", "save_steps": 2, **evaluated}
    sharded = ranks(2)(ranked, str(tmp_path / "run"), 3, **saving)[0]
    for name in NAMES:
        assert sharded[name] == pytest.approx(alone[name], abs=2e-5), name
    assert_close(load_file(tmp_path / "run" / "ema.safetensors"), expected)

    (tmp_path / "run" / "ema.safetensors").unlink()
    ranks(2)(ranked, str(tmp_path / "run"), 1, resume=str(tmp_path / "run" / "checkpoint-2"), **evaluated)
    assert_close(load_file(tmp_path / "run" / "ema.safetensors"), expected)

    plain = ranks(2)(ranked, str(tmp_path / "plain"), 3, ema=False, **evaluated)[0]
    assert plain["loss"] == sharded["loss"]
    for name in NAMES[1:]:  # each step of both sets has other weights
        assert len(plain[name]) == len(sharded[name]) == 2
        assert all(without != averaged for without, averaged in zip(plain[name], sharded[name], strict=True))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def test_the_average_is_the_formula() -> None:
    from types import SimpleNamespace

    model, ema = torch.nn.Linear(2, 1, bias=False), ShardEMACallback(0.75)
    model.weight.data.fill_(1.0)
    ema.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
    model.weight.data.fill_(5.0)
    ema.on_optimizer_step(None, None, None, model=model)
    with ema.swapped(model):
        assert model.weight.tolist() == [[2.0, 2.0]]
    assert model.weight.tolist() == [[5.0, 5.0]]


class Broken(Tokens):
    """A set whose last row can't be read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == len(self) - 1:
            raise OSError("the row is gone")
        return super().__getitem__(index)


def test_an_evaluation_that_raises_leaves_the_weights(tmp_path: Path) -> None:
    from transformers import Trainer

    quiet()
    enable(None)
    ema = ShardEMACallback(0.5, evaluate=True)
    args = arguments(Case(), tmp_path, 1, eval_strategy="steps", eval_steps=2)
    trainer = Trainer(llama(), args, train_dataset=Tokens(ROWS), eval_dataset=Broken(8), callbacks=[ema])
    with pytest.raises(OSError, match="the row is gone"):
        trainer.train()
    weights = trainer.model.lm_head.weight
    with ema.swapped(trainer.model):
        average = weights.detach().clone()
    assert not torch.equal(weights, average)


def test_it_is_refused_where_the_trainer_has_no_events_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURSHARD_DISABLE", "1")
    ShardEMACallback(0.5)
    with pytest.raises(ValueError, match="OURSHARD_DISABLE=1 keeps them out"):
        ShardEMACallback(0.5, evaluate=True)


def test_a_decay_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay is 1\.0"):
        ShardEMACallback(1.0)
