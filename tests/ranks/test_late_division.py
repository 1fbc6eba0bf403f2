"""Clipping that waits for the step, and the optimizer's own parameters: Notes [Late division] and [Runs]."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.ranks.nets import WIDTH, numbers, square_loss, toy
from tests.ranks.pairs import Pair, joined, pair, part
from tests.ranks.training import Result, assert_same_bits, difference

pytestmark = pytest.mark.ranks

STAGE_3 = {"stage": 3, "persist_below": 0}
HOST = {**STAGE_3, "offload": {"optimizer": "cpu"}}
LEAST = 1e-2  # a norm that all are clipped to


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW in which the size of gradients counts."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, **options)


def clip(both: Pair) -> None:
    from ourshard import clip_grad_norm_

    nn.utils.clip_grad_norm_(both.plain.parameters(), LEAST)
    clip_grad_norm_(both.sharded, LEAST)


def adopted(config: dict[str, Any] = STAGE_3, make: Any = toy) -> Pair:
    """Return both models, and an optimizer that is adopted already, so that clipping waits for its first step."""
    from ourshard import adopt_optimizer

    both = pair(config, make, adamw)
    adopt_optimizer(both.optimizer)
    return both


def flats(both: Pair) -> list[Any]:
    return [p for group in both.optimizer.param_groups for p in group["params"]]


def waiting(both: Pair) -> list[bool]:
    return [lane.notes.divisor is not None for lane in both.engine.lanes()]


class Branches(nn.Module):
    """Two layers that are used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(rows)))


def looked_at(looks: bool, scaled: bool = False) -> Result:
    """Train with clipping; where someone looks at a gradient between clipping and the step, it is divided before it."""
    from ourshard import clip_grad_norm_, engine_of, full_state_dict, shard_model

    model = shard_model(toy(), STAGE_3)
    optimizer, result = adamw(model.parameters()), Result()
    lanes = list(engine_of(model).lanes())
    for number in range(3):
        loss = square_loss(model, part(joined(number)))
        loss.backward()
        result.norms.append(clip_grad_norm_(model, 1e-3).item())
        waits = [lane.notes.divisor is not None for lane in lanes]
        assert all(waits) if number else not any(waits)  # the optimizer is adopted at its first step
        flat = optimizer.param_groups[0]["params"]
        if looks and number == 1:
            assert torch.stack([p.grad.norm() for p in flat]).norm() < 2e-3
        if looks and number == 2:
            assert sum(p.grad.local.square().sum().item() for p in model.parameters()) ** 0.5 < 2e-3
        if scaled:
            optimizer.found_inf = torch.zeros(())
        with mock.patch.object(torch, "_foreach_div_", side_effect=AssertionError("a pass of its own")):
            optimizer.step()
        assert not hasattr(optimizer, "grad_scale")
        assert not any(lane.notes.divisor is not None for lane in lanes)
        after = torch.stack([p.grad.norm() for p in flat]).norm()
        assert after < 2e-3  # as clipping has made them
        optimizer.zero_grad()
        result.losses.append(loss.item())
    result.state = full_state_dict(model)
    return result


def both_looks() -> None:
    wanted = looked_at(True)
    for found in (looked_at(False), looked_at(False, scaled=True)):
        assert_same_bits(found, wanted)


def test_a_step_that_divides_has_the_bits_of_clipping_before_it_and_hides_nothing(ranks):
    ranks(2)(both_looks)


def failing(config: dict[str, Any]) -> None:
    """Clip, fail in a step, mend what was wrong, and step again: as if the step had not failed."""
    from ourshard import clip_grad_norm_, full_state_dict, shard_model

    states = []
    for fails in (False, True):
        model = shard_model(toy(), config)
        optimizer = adamw(model.parameters())
        for number in range(2):
            square_loss(model, part(joined(number))).backward()
            clip_grad_norm_(model, 1e-3)
            if fails and number:
                betas, optimizer.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"], None
                with pytest.raises(TypeError):
                    optimizer.step()
                optimizer.param_groups[0]["betas"] = betas
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_state_dict(model))
    assert difference(*states) == 0.0


@pytest.mark.parametrize("config", [STAGE_3, HOST], ids=["stage 3", "host"])
def test_a_step_that_fails_leaves_gradients_clipped(ranks, config):
    ranks(2)(failing, config)


def copied() -> None:
    """Copy and pickle an optimizer of flat parameters: copies are plain."""
    both = pair(STAGE_3, optimizer=adamw)
    both.train(1)
    for twin in (copy.deepcopy(both.optimizer.param_groups), pickle.loads(pickle.dumps(both.optimizer.param_groups))):
        for group, other in zip(both.optimizer.param_groups, twin, strict=True):
            for mine, theirs in zip(group["params"], other["params"], strict=True):
                assert type(theirs) is nn.Parameter
                assert torch.equal(mine, theirs)
                assert torch.equal(mine, nn.Parameter(mine))
                assert nn.Parameter(mine).grad is None


def test_parameters_of_an_optimizer_are_copied_as_plain_ones(ranks):
    ranks(2)(copied)


def dropped() -> None:
    """Drop one gradient after another between clipping and the step, in the groups of the optimizer; train on."""
    for number in range(4):
        both = adopted()
        both.backward(joined(0))
        clip(both)
        assert all(waiting(both))
        flat = flats(both)[number]
        (run,) = [run for lane in both.engine.lanes() for run in lane.runs if run.parameter is flat]
        plain = dict(both.plain.named_parameters())
        for position in run.positions:
            plain[run.lane.name_of(position)].grad = None
        if number % 2:
            del flat.grad
        else:
            flat.grad = None
        both.step()
        both.assert_same(1e-7)
        both.zero_grad()
        both.backward(joined(1))
        clip(both)
        both.step()
        both.assert_same(1e-6)


def test_a_gradient_that_is_dropped_after_clipping_leaves_others_clipped(ranks):
    ranks(2)(dropped)


def skipped(config: dict[str, Any], kind: str) -> None:
    """Clip, drop all gradients instead of a step, and train on, with a part of a lane that has no gradients."""
    both = adopted(config, Branches)
    both.backward(numbers_of(0))
    clip(both)
    assert any(waiting(both))
    both.plain.zero_grad()
    if kind == "groups":
        for flat in flats(both):
            flat.grad = None
    elif kind == "model":
        for parameter in both.sharded.parameters():
            parameter.grad = None
    else:
        both.optimizer.zero_grad()
    for number in (1, 2):
        both.backward(numbers_of(number))
        clip(both)
        both.step()
        both.zero_grad()
    both.assert_same(1e-6)


def numbers_of(number: int) -> torch.Tensor:
    return numbers(number, 4)


@pytest.mark.parametrize("kind", ["groups", "model", "zero_grad"])
@pytest.mark.parametrize("config", [STAGE_3, HOST], ids=["stage 3", "host"])
def test_a_step_that_is_skipped_divides_nothing_later(ranks, config, kind):
    ranks(2)(skipped, config, kind)


def failing_beside() -> None:
    """Fail in a parameter that is not sharded, of the same optimizer: nothing is stepped before that is mended."""
    plain, sharded = toy(), None
    from ourshard import adopt_optimizer, shard_model

    sharded = shard_model(toy(), STAGE_3)
    beside = [nn.Parameter(torch.zeros(3, 2)) for _ in range(2)]
    both = Pair(plain, sharded, adamw([*plain.parameters(), beside[0]]), adamw([*sharded.parameters(), beside[1]]))
    adopt_optimizer(both.optimizer)
    both.backward(joined(0))
    clip(both)
    for parameter in beside:
        parameter.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        both.optimizer.step()
    both.assert_same(1e-7)
    for parameter in beside:
        parameter.grad = torch.ones(3, 2)
    both.step()
    both.assert_same(1e-7)


def test_a_step_that_fails_beside_sharded_parameters_has_not_stepped_these(ranks):
    ranks(2)(failing_beside)


def replaced() -> None:
    """Step by a method that someone put in the place of the class's, around it or without a word of it."""
    known = torch.optim.AdamW.step
    for wraps in (functools.wraps(known), lambda function: function):

        @wraps
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            return known(self, *args, **kwargs)  # type: ignore[arg-type]

        both = adopted()
        with mock.patch.object(torch.optim.AdamW, "step", step):
            for number in range(3):
                both.zero_grad()
                both.backward(joined(number))
                clip(both)
                both.step()
                assert all(flat.grad is not None for flat in flats(both))
        both.assert_same(1e-6)
        assert both.engine.control.steps == 3


def test_a_step_that_was_replaced_on_its_class_runs_once(ranks):
    ranks(2)(replaced)


def kept(folder: str) -> None:
    """Count the gradients that are divided in a pass of their own, which is what waiting spares."""
    from ourshard.runtime.gradient_notes import GradientNotes

    offloads = ({}, {"optimizer": "cpu"}, {"optimizer": "cpu", "overlap_step": True})
    for offload in (*offloads, {"optimizer": "nvme", "nvme_path": folder}):
        both = adopted({**STAGE_3, "offload": offload})
        with mock.patch.object(GradientNotes, "apply", autospec=True, side_effect=AssertionError("a pass")):
            for number in range(2):
                both.backward(joined(number))
                clip(both)
                both.step()
                both.zero_grad()
        both.assert_same(1e-6)


def test_no_tier_divides_in_a_pass_of_its_own(ranks, tmp_path):
    ranks(2)(kept, str(tmp_path))


def half() -> None:
    """Clip 16-bit masters, whose division is rounded: it does not wait."""
    both = adopted({**STAGE_3, "precision": {"master_dtype": "bfloat16"}})
    both.backward(joined(0))
    clip(both)
    assert not any(waiting(both))


def test_gradients_of_16_bits_are_divided_at_once(ranks):
    ranks(2)(half)


def chosen() -> None:
    """Ask torch what it would do of itself with the optimizer's parameters."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    both = adopted()
    with mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", return_value=["cpu"]):
        assert _default_to_fused_or_foreach(flats(both), False, False) == (False, True)


def test_torch_still_takes_its_multi_tensor_kernels_for_other_optimizers(ranks):
    ranks(2)(chosen)


def frames() -> None:
    """Compile a step with clipping: what of ours runs around it is no part of a graph."""
    from torch._dynamo.utils import counters

    both = adopted()
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(both.optimizer.step, backend="eager")
    for number in range(4):
        both.zero_grad()
        both.backward(joined(number))
        clip(both)
        both.plain_optimizer.step()
        step()
    both.assert_same(1e-6)
    assert counters["frames"]["total"] <= 12


def test_a_compiled_step_that_divides_is_that_of_one_process(ranks):
    ranks(2)(frames)
