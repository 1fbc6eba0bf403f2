"""`ShardSentinelCallback` names what went wrong, on all ranks, and changes nothing where nothing did."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ourshard.trainer_callbacks import ShardSentinelCallback
from ourshard.trainer_callbacks.sentinel_stragglers import compare
from transformers import TrainerControl

from tests.integrations.trainer_runs import ROWS, Case, Tokens, arguments, enable, llama, logged, quiet

BAD = "model.layers.1.mlp.up_proj.weight"


class Clock:
    """Seconds that pass as this process looks at them, a thousandth each time, and as it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        self.seconds += 0.001
        return self.seconds

    def pass_on(self, seconds: float) -> None:
        self.seconds += seconds


def train(
    folder: str, fault: str, stage: int = 3, early: bool = False, **options: Any
) -> tuple[list[float], list[str], int]:
    """Train 4 steps with a fault; return losses, what the sentinel said on this rank, and steps done."""
    import torch.distributed as dist
    from ourshard.runtime import meter
    from ourshard.runtime.api import engine_of
    from ourshard.runtime.clip import register_clip_pre_hook
    from transformers import Trainer, TrainerCallback

    quiet()
    enable({"stage": stage, "persist_below": 64, "optimizer_in_backward": early})
    hears = dist.get_rank() == 1
    hooks: list[Any] = []
    clock = Clock()

    class Fault(TrainerCallback):  # type: ignore[misc]
        """Does its harm on rank 1, in step 2."""

        due = False

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if not hears:
                return
            if fault == "reduced":
                hooks.append(register_clip_pre_hook(partial(self.spoil_reduced, model)))
            if fault == "made":
                dict(model.named_modules())[BAD.removesuffix(".weight")].register_forward_hook(self.spoil_made)
            if fault == "forward":
                dict(model.named_modules())[BAD.removesuffix(".weight")].register_forward_hook(self.spoil_forward)
            if fault == "slow":
                block = dict(model.named_modules())["model.layers.1"]
                block.register_forward_pre_hook(lambda module, inputs: clock.pass_on(1.0))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.due = state.global_step == 1

        def spoil_reduced(self, model: Any) -> None:
            if self.due:
                lane, position = next((p._lane, p._position) for n, p in model.named_parameters() if n == BAD)
                lane.rows_view(lane.gradient, position).view(-1)[3] = math.nan

        def spoil_made(self, module: Any, inputs: Any, output: Any) -> None:
            if self.due:
                output.register_hook(lambda gradient: gradient * math.nan)

        def spoil_forward(self, module: Any, inputs: Any, output: Any) -> Any:
            return output * math.nan if self.due else None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if fault == "copy" and hears and state.global_step == 2:
                whole = next(lane for lane in engine_of(model).lanes() if lane.placement.whole)
                whole.resting[0].data[0] += 1.0

    watching = [ShardSentinelCallback(**options)] if options else []
    trainer = Trainer(
        model=llama(),
        args=arguments(Case(), Path(folder), 2, max_grad_norm=0.0 if early else 1.0),
        train_dataset=Tokens(ROWS),
        callbacks=[Fault(), *watching],
    )
    with logged(logging.WARNING) as told, patch.object(meter, "time", clock if fault == "slow" else time):
        try:
            trainer.train()
        except RuntimeError as error:
            told.append(f"raised {error}")
        finally:
            for hook in hooks:
                hook.remove()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, [text for text in told if "entinel" in text], trainer.state.global_step


@pytest.mark.ranks
def test_it_changes_nothing_where_nothing_is_wrong(ranks: Any, tmp_path: Any) -> None:
    plain = ranks(2)(train, str(tmp_path), "")[0]
    watched = ranks(2)(train, str(tmp_path), "", every=1)[0]
    assert watched == plain
    assert watched[1] == []


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_the_first_gradient_that_is_not_finite_is_named_with_unit_and_rank(
    ranks: Any, tmp_path: Any, stage: int
) -> None:
    """The Trainer clips before its callbacks hear, and by then every gradient of every rank is NaN."""
    for _, told, steps in ranks(2)(train, str(tmp_path), "made", stage, every=1, action="raise"):
        assert steps == 1
        assert told[0].startswith(
            "raised ShardSentinelCallback: step 2: gradients are not finite, first on rank 1: "
            f"{BAD} (unit model.layers.1) and "
        )
        assert told[0].endswith("; those of ranks [0] were finite before the reduction.")
        assert len(told) == 1


@pytest.mark.ranks
def test_a_forward_that_is_not_finite_is_named_by_its_first_unit(ranks: Any, tmp_path: Any) -> None:
    """All gradients are NaN then, and the head's, which backward makes first, says nothing."""
    for _, told, _ in ranks(2)(train, str(tmp_path), "forward", every=1, action="raise"):
        assert told == [
            "raised ShardSentinelCallback: step 2: gradients are not finite, on rank 1 from its forward on, where "
            "model.layers.1 is the first unit whose result is not; those of ranks [0] were finite before the reduction."
        ]


@pytest.mark.ranks
def test_where_backward_steps_it_says_that_it_is_too_late(ranks: Any, tmp_path: Any) -> None:
    for _, told, steps in ranks(2)(train, str(tmp_path), "made", 3, True, every=1, action="raise"):
        assert steps == 1
        assert f"step 2: gradients are not finite, first on rank 1: {BAD}" in told[0]
        assert told[0].endswith(
            "Units were stepped with them already (optimizer_in_backward): go on from a checkpoint."
        )


@pytest.mark.ranks
def test_a_gradient_that_the_reduction_spoilt_is_named_on_every_rank(ranks: Any, tmp_path: Any) -> None:
    first, second = ranks(2)(train, str(tmp_path), "reduced", every=1, action="stop")
    assert (first[2], second[2]) == (2, 2)
    assert [text.count(BAD) for text in first[1]] == [1]
    assert "step 2: gradients are not finite, though all ranks' own were before the reduction: rank 1" in first[1][0]
    assert second[1] == []


@pytest.mark.ranks
def test_a_slow_rank_is_named_with_its_unit(ranks: Any, tmp_path: Any) -> None:
    first, second = ranks(2)(train, str(tmp_path), "slow", every=9, straggler=3.0, straggler_every=4)
    assert len(first[1]) == 1
    assert "step 4: rank 1 computes" in first[1][0]
    assert "most of that in unit model.layers.1:" in first[1][0]
    assert second[1] == []


def test_a_rank_is_slow_beside_the_median_of_the_others() -> None:
    even = [{"unit a": 0.010, "unit b": 0.020}] * 3
    assert compare(even, [0.0] * 3, 1.5) is None
    assert compare(even[:1], [0.0], 1.5) is None
    text = compare([*even, {"unit a": 0.012, "unit b": 0.090}], [0.06, 0.07, 0.08, 0.0], 1.5)
    assert text == (
        "rank 3 computes 102 ms a step, the others 30; most of that in unit b: 90 ms, the others 20. They wait 70 ms a "
        "step."
    )


@pytest.mark.ranks
def test_copies_that_differ_stop_training_and_are_named(ranks: Any, tmp_path: Any) -> None:
    first, second = ranks(2)(train, str(tmp_path), "copy", every=2, action="stop")
    assert (first[2], second[2]) == (2, 2)
    assert len(first[1]) == 1
    assert "step 2: copies that should be equal are not: unit" in first[1][0]
    assert "ranks [1] differ" in first[1][0]
    assert second[1] == []


def test_losses_that_jump_or_are_not_finite_are_said(caplog: pytest.LogCaptureFixture) -> None:
    sentinel = ShardSentinelCallback(window=10, action="stop")
    control, state = TrainerControl(), SimpleNamespace(global_step=7, is_world_process_zero=True)
    with caplog.at_level(logging.WARNING, "ourshard"):
        for loss in (2.0, 2.1, 1.9, 5.9):
            sentinel.on_log(None, state, control, {"loss": loss})
        assert not caplog.messages
        sentinel.on_log(None, state, control, {"loss": 6.5})
        assert caplog.messages == ["sentinel: step 7: the loss jumped to 6.5; the median was 2.05."]
        assert not control.should_training_stop
        sentinel.on_log(None, state, control, {"loss": math.nan})
    assert caplog.messages[1:] == ["sentinel: step 7: the loss is nan."]
    assert control.should_training_stop


def test_a_norm_that_is_not_finite_is_said_where_the_trainer_hides_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    sentinel, control = ShardSentinelCallback(action="stop"), TrainerControl()
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    hidden = {"loss": 0.0, "grad_norm": math.nan}
    with caplog.at_level(logging.WARNING, "ourshard"):
        scaler = SimpleNamespace(scaler=object())  # it skips a step that overflowed
        sentinel.on_step_begin(None, state, control, optimizer=scaler)
        sentinel.on_log(None, state, control, hidden)
        assert not caplog.messages
        sentinel.on_step_begin(None, state, control)
        sentinel.on_log(None, state, control, hidden)
    assert caplog.messages == ["sentinel: step 3: the norm of all gradients is nan."]
    assert control.should_training_stop
    assert len(sentinel._losses) == 1  # that of a step without a gradient is no measure of later ones


def test_without_ourshard_it_looks_at_the_gradients_of_this_process() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), math.inf)
    sentinel = ShardSentinelCallback(every=1, action="raise")
    with pytest.raises(RuntimeError, match="step 1: gradients are not finite: weight"):
        sentinel.on_pre_optimizer_step(None, SimpleNamespace(global_step=0), TrainerControl(), model=model)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        ShardSentinelCallback(every=0)
    with pytest.raises(ValueError, match=r"straggler=1\.0"):
        ShardSentinelCallback(straggler=1.0)
    with pytest.raises(ValueError, match="action is 'shout'; use one of warn, stop, raise"):
        ShardSentinelCallback(action="shout")
