"""Steps that go on while the next forward begins (Note [Overlapped steps] in behind.py), and clipping that waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.ranks.nets import llama, square_loss, token_loss, tokens, toy
from tests.ranks.pairs import joined, part
from tests.ranks.test_optimizers import make_optimizer
from tests.ranks.training import adamw

pytestmark = pytest.mark.ranks

HERE = {"stage": 3, "persist_below": 20}
THERE = {**HERE, "offload": {"optimizer": "cpu"}}
BEHIND = {**HERE, "offload": {"optimizer": "cpu", "overlap_step": True}}


def trained(config: dict[str, Any], kind: str, set_to_none: bool = True) -> tuple[dict[str, torch.Tensor], Any]:
    """Train a toy with a scheduler, accumulation and clipping; each step of a lane takes a while."""
    from ourshard import clip_grad_norm_, full_state_dict, shard_model
    from ourshard.runtime import behind

    model = shard_model(toy(), config)
    optimizer = make_optimizer(kind, model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run, behind._run = behind._run, slowly(behind._run)
    try:
        for step in range(3):
            for micro in range(2):
                square_loss(model, part(joined(2 * step + micro))).backward()
            clip_grad_norm_(model, 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none)
        return full_state_dict(model), optimizer.state_dict()
    finally:
        behind._run = run


def slowly(run: Any) -> Any:
    def wait_and_run(*args: Any) -> None:
        time.sleep(0.02)
        run(*args)

    return wait_and_run


def each_kind(kinds: tuple[str, ...], ways: tuple[bool, ...] = (True, False)) -> None:
    for kind in kinds:
        for set_to_none in ways:
            (mine, states), (theirs, others) = [trained(config, kind, set_to_none) for config in (HERE, BEHIND)]
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items()), kind
            for number, state in states["state"].items():
                for name, value in state.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(others["state"][number][name])), kind


def test_an_overlapped_step_has_the_bits_of_one_that_is_waited_for(ranks):
    ranks(2)(each_kind, ("AdamW",), (True,))
    ranks(2)(each_kind, ("SGD nesterov",), (False,))


@pytest.mark.slow
def test_it_has_with_other_optimizers_too(ranks):
    ranks(2)(each_kind, ("AdamW", "AdamW one by one", "SGD nesterov", "Adagrad"))


def begun(kind: str) -> dict[str, Any]:
    """Step with lanes that take 0.1 s; return how many lanes were under way then, and after what looks at them."""
    from ourshard import engine_of, shard_model
    from ourshard.checkpoint.background import BACKGROUND
    from ourshard.runtime import behind

    model = shard_model(toy(), BEHIND)
    engine = engine_of(model)
    assert engine is not None
    optimizer = adamw(model.parameters())
    if kind == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    if kind == "after a save":  # which counts steps
        BACKGROUND._steps.begin()
        BACKGROUND._steps.end()
    under_way = lambda: sum(lane.stepping is not None for lane in engine.lanes())  # noqa: E731
    run, seen = behind._run, []

    def hold(*args: Any) -> None:
        time.sleep(0.1)
        run(*args)

    behind._run = hold
    try:
        square_loss(model, part(joined(0))).backward()
        optimizer.step()
        seen.append(under_way())
        if kind == "forward":
            square_loss(model, part(joined(1)))
        elif kind == "state_dict":
            optimizer.state_dict()
        elif kind == "rows":
            for lane in engine.lanes():
                lane.local_rows(0)
        elif kind == "step":
            optimizer.step()
        seen.append(under_way())
    finally:
        for lane in engine.lanes():
            lane.await_step()
        behind._run = run
    lanes = sum(lane.offloaded for lane in engine.lanes())
    return {"seen": seen, "lanes": lanes}


@pytest.mark.parametrize("kind", ["forward", "state_dict", "rows", "hook", "after a save", "nobody"])
def test_a_step_returns_while_lanes_are_stepped_and_whoever_looks_waits(ranks, kind):
    for told in ranks(2)(begun, kind):
        lanes = told["lanes"]
        assert lanes > 3
        nobody_looks = [lanes, lanes]
        seen = {"hook": [0, 0], "after a save": nobody_looks, "nobody": nobody_looks}
        assert told["seen"] == seen.get(kind, [lanes, 0])


def clipped() -> None:
    """See the gradients of the model and of the optimizer between clipping and the step."""
    from ourshard import clip_grad_norm_, engine_of, shard_model

    model = shard_model(toy(), THERE)
    engine = engine_of(model)
    assert engine is not None
    optimizer = adamw(model.parameters())

    def backward(number: int) -> float:
        square_loss(model, part(joined(number))).backward()
        lane = next(lane for lane in engine.lanes() if lane.offloaded)
        return lane.gradient.abs().sum().item()

    backward(0)
    optimizer.step()  # adopts
    optimizer.zero_grad()
    lane = next(lane for lane in engine.lanes() if lane.offloaded)
    flat = next(run.parameter for run in lane.runs if run.stop > run.start)

    whole = backward(1)
    norm = clip_grad_norm_(model, 1e-3).item()
    assert lane.notes.divisor is not None  # nothing was passed over yet
    found = lane.gradient.abs().sum().item()  # as `parameter.grad` of the model has it
    assert lane.notes.divisor is None
    assert found == pytest.approx(whole * 1e-3 / norm, rel=1e-4)
    assert clip_grad_norm_(model, 1e9).item() == pytest.approx(1e-3, rel=1e-4)
    optimizer.zero_grad()

    whole = backward(2)
    clip_grad_norm_(model, 1e-3)
    assert flat.grad.abs().sum().item() < whole / 2  # the optimizer's own
    assert lane.notes.divisor is None
    optimizer.zero_grad()

    backward(2)
    before = flat.grad
    clip_grad_norm_(model, 1e-3)
    before.add_(1.0)
    with pytest.raises(RuntimeError, match="was changed between clipping and the step"):
        optimizer.step()
    optimizer.zero_grad()

    seen: list[float] = []
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(flat.grad.abs().sum().item()))
    whole = backward(3)
    norm = clip_grad_norm_(model, 1e-3).item()
    optimizer.step()
    handle.remove()
    assert seen[0] < whole
    optimizer.zero_grad()
    backward(4)
    clip_grad_norm_(model, 1e-3)
    optimizer.zero_grad()
    assert lane.notes.divisor is None
    backward(5)
    clip_grad_norm_(model, 1e-3)
    optimizer.zero_grad(set_to_none=False)  # a step that is skipped
    assert lane.notes.divisor is None
    assert lane.gradient.count_nonzero() == 0


def test_clipping_waits_for_the_step_and_whoever_reads_finds_it_done(ranks):
    ranks(2)(clipped)


def twice(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Clip, add another backward, clip again with another norm, and let two optimizers step one model."""
    from ourshard import clip_grad_norm_, full_state_dict, shard_model

    model = shard_model(llama(), config)
    parameters = list(model.parameters())
    optimizers = [adamw(parameters[:7]), torch.optim.SGD(parameters[7:], lr=0.1)]
    for step in range(3):
        for number, most in enumerate((0.3, 0.1)):
            token_loss(model, tokens(2 * step + number, 2)).backward()
            clip_grad_norm_(model, most)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return full_state_dict(model)


def test_clipping_twice_with_two_optimizers_has_the_bits_of_clipping_on_the_device(ranks):
    for mine, theirs in zip(ranks(2)(twice, {**HERE}), ranks(2)(twice, THERE), strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def clipped_doubles(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from ourshard import clip_grad_norm_, full_state_dict, shard_model

    model = shard_model(toy().double(), config)
    optimizer = adamw(model.parameters())
    for step in range(2):
        model(part(joined(step)).double()).square().mean().backward()
        clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


def test_a_norm_in_double_precision_clips_on_the_host_as_on_the_device(ranks):
    """torch's fused optimizers take a divisor in float32 alone."""
    for mine, theirs in zip(ranks(2)(clipped_doubles, HERE), ranks(2)(clipped_doubles, THERE), strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.parametrize(
    ("offload", "stage", "said"),
    [
        ({}, 3, "no step is on the host"),
        ({"optimizer": "nvme", "nvme_path": "/tmp"}, 3, "a read that fails must stop all ranks"),
        ({"optimizer": "cpu"}, 2, "needs stage 3"),
    ],
)
def test_what_can_not_overlap_is_refused_with_the_reason(offload, stage, said):
    from ourshard.config import ShardConfig

    with pytest.raises(ValueError, match=said):
        ShardConfig.from_dict({"stage": stage, "offload": {**offload, "overlap_step": True}})


def left_out(config: dict[str, Any]) -> list[float]:
    """Clip all gradients and step every second parameter; return what is left of those of the others, by parameter."""
    from ourshard import clip_grad_norm_, shard_model

    model = shard_model(toy(), config)
    handles = list(model.parameters())
    optimizer = adamw(handles[::2])
    others = [(handle._lane, handle._position) for handle in handles[1::2] if hasattr(handle, "_lane")]
    for number in range(2):  # the first step adopts
        model.zero_grad()
        square_loss(model, part(joined(number))).backward()
        clip_grad_norm_(model, 1e-3)
        optimizer.step()
    return [lane.local_gradient_rows(position).abs().sum().item() for lane, position in others]


def test_gradients_that_no_optimizer_steps_are_clipped_too(ranks):
    for here, there in zip(ranks(2)(left_out, HERE), ranks(2)(left_out, THERE), strict=True):
        assert 0 < sum(here) < 1e-2
        assert there == pytest.approx(here, rel=1e-5, abs=1e-12)


def evaluated_between(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with momentum, which the first step makes; what waits for a step is an evaluation in inference mode."""
    from ourshard import full_state_dict, shard_model

    model = shard_model(toy(), config)
    optimizer = make_optimizer("SGD nesterov", model.parameters())
    for step in range(3):
        square_loss(model, part(joined(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            model(part(joined(9)))
    return full_state_dict(model)


def both_ways() -> None:
    here, behind = evaluated_between(HERE), evaluated_between(BEHIND)
    assert all(torch.equal(value, behind[name]) for name, value in here.items())


def test_an_evaluation_in_inference_mode_may_be_what_waits_for_a_step(ranks):
    ranks(2)(both_ways)
