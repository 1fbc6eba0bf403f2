"""`ShardMonitorCallback`: what it logs is there for trackers, is right where it can be known, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.planning.hardware import peak_flops_of
from ourshard.trainer_callbacks import ShardMonitorCallback
from ourshard.trainer_callbacks.flops import Flops

from tests.integrations.trainer_runs import LENGTH, ROWS, VOCAB, Case, Tokens, arguments, enable, llama, quiet

STEPS = 4


def train(folder: str, shard: dict[str, Any] | None, world: int, watched: bool, **more: Any) -> dict[str, Any]:
    """Train; return losses, the logs as a tracker that comes first has them, the model's sizes and the last bytes."""
    from transformers import Trainer, TrainerCallback

    quiet()
    enable(shard)
    tracked: list[dict[str, float]] = []

    class Tracker(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            tracked.append(dict(logs))

    monitor = ShardMonitorCallback(peak_flops=1e9)
    trainer = Trainer(
        model=llama(),
        args=arguments(Case(steps=STEPS), Path(folder), world, eval_strategy="steps", eval_steps=2, **more),
        train_dataset=Tokens(ROWS),
        eval_dataset=Tokens(8, seed=1),
        callbacks=[Tracker(), *([monitor] if watched else [])],
    )
    trainer.train()
    engine = getattr(trainer.model, "_ourshard", None)
    return {
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "logs": [log for log in tracked if "loss" in log],
        "evaluated": [log for log in tracked if "eval_loss" in log],
        "wire": monitor.wire,
        "off": engine is None or engine.measuring.meter is None,
    }


def ranked(folder: str, watched: bool, **config: Any) -> dict[str, Any]:
    return train(folder, {"stage": 3, "persist_below": 64, **config}, 2, watched, logging_steps=2)


@pytest.mark.ranks
def test_trackers_get_the_same_figures_on_all_ranks_and_the_losses_stay(ranks: Any, tmp_path: Path) -> None:
    plain = ranks(2)(ranked, str(tmp_path / "plain"), False)[0]
    first, second = ranks(2)(ranked, str(tmp_path / "run"), True)
    assert first["loss"] == plain["loss"]
    assert first["off"]
    assert not any("tokens_per_second" in log for log in first["evaluated"])
    assert len(first["logs"]) == STEPS // 2
    for log, same in zip(first["logs"], second["logs"], strict=True):
        assert log == same
        tokens = Case().batch * LENGTH
        seconds = log["step_ms"] / 1e3
        assert log["tokens_per_second"] == pytest.approx(tokens / seconds)
        weights = 32 * 32 * 4 * 2 + 3 * 32 * 77 * 2 + VOCAB * 32  # projections, MLPs, head
        flops = tokens * (6 * weights + 12 * 2 * 32 * LENGTH)
        assert log["mfu"] == pytest.approx(flops / seconds / 2e9)
        assert "exposed_input_ms" not in log
        assert 0 < log["exposed_gather_ms"] + log["exposed_reduce_ms"] + log["agree_ms"] < log["step_ms"]
        assert log["memory_states_mb"] == pytest.approx(2 * log["memory_master_mb"], rel=0.02)  # AdamW
        assert log["wire_mb"] == pytest.approx(sum(first["wire"].values()) / 1e6, rel=0.01)  # no evaluation in it
    assert set(first["wire"]) >= {"all_gather/shard", "reduce_scatter/shard"}


@pytest.mark.ranks
def test_the_summary_is_a_picture_and_a_page_of_rank_0(ranks: Any, tmp_path: Path) -> None:
    on_host = {"activation_checkpointing": True, "offload": {"activations": "cpu"}}
    ranks(2)(ranked, str(tmp_path), True, **on_host)
    picture = (tmp_path / "shard_monitor.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    page = (tmp_path / "shard_monitor.html").read_text()
    waits = ("exposed_gather_ms", "exposed_input_ms")
    for word in ("tokens_per_second", "mfu", *waits, "memory_slot_mb", "all_gather/shard", "grad_norm"):
        assert f"<td>{word}" in page


@pytest.mark.ranks
def test_waits_that_a_replay_would_hide_are_left_out(ranks: Any, tmp_path: Path) -> None:
    for log in ranks(2)(ranked, str(tmp_path), True, cuda_graph=True)[0]["logs"]:
        assert log["agree_ms"] > 0
        assert log["wire_mb"] > 0
        assert not any(name.startswith("exposed") for name in log)
    assert (tmp_path / "shard_monitor.html").is_file()


def test_without_ourshard_it_has_the_speed(tmp_path: Path) -> None:
    logs = train(str(tmp_path), None, 1, True)["logs"]
    assert len(logs) == STEPS
    assert all(log["tokens_per_second"] > 0 and "wire_mb" not in log for log in logs)


def test_operations_of_frozen_weights_and_of_experts() -> None:
    model = llama()
    whole = Flops(model).of_call(model, (), {"input_ids": torch.zeros(2, 5, dtype=torch.long)})
    model.requires_grad_(False)
    frozen = Flops(model).of_call(model, (), {"input_ids": torch.zeros(2, 5, dtype=torch.long)})
    attention = 10 * 12 * 2 * 32 * 5
    assert whole[0] == frozen[0] == 10
    assert (frozen[1] - attention) / (whole[1] - attention) == pytest.approx(4 / 6)
    model.config.num_experts = 4
    assert "experts" in Flops(model).unknown
    assert Flops(model, 100.0).of_call(model, (torch.zeros(2, 5),), {}) == (10, 1000.0)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_card_or_none(name: str, tflops: float | None) -> None:
    assert peak_flops_of(name) == (None if tflops is None else tflops * 1e12)


def test_a_peak_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="peak_flops is 0"):
        ShardMonitorCallback(peak_flops=0)
