"""Steps by lane (Note [Steps by lane] in lane_step.py): the bits of whole steps, and what hooks and callers see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import joined, part
from tests.ranks.test_optimizers import KINDS, make_optimizer

pytestmark = pytest.mark.ranks

HERE = {"stage": 3, "persist_below": 20}  # some parameters stay on the device
THERE = {**HERE, "offload": {"optimizer": "cpu"}}


class Counted(torch.optim.AdamW):
    """An optimizer of another class than torch's: it may count its steps."""


def trained(config: dict[str, Any], make: Any, around: Any = None, steps: int = 3) -> tuple[Any, Any, list[int]]:
    """Train a toy; return its weights, its optimizer and how many steps the class was asked for in each step."""
    from ourshard import clip_grad_norm_, full_state_dict, shard_model

    model = shard_model(toy(), config)
    optimizer = make(model.parameters())
    if around is not None:
        around(model, optimizer)
    counts, known = [], type(optimizer).step.__wrapped__
    for step in range(steps):
        square_loss(model, part(joined(step))).backward()
        clip_grad_norm_(model, 0.05)
        counts.append(0)

        def inner(self: Any, closure: Any = None) -> Any:
            counts[-1] += 1
            return known(self, closure)

        type(optimizer).step.__wrapped__, before = inner, known
        try:
            optimizer.step()
        finally:
            type(optimizer).step.__wrapped__ = before
        optimizer.zero_grad()
    return full_state_dict(model), optimizer, counts


def same(config: Any, other: Any, make: Any, around: Any = None, steps: int = 3) -> list[int]:
    results = [trained(each, make, around, steps) for each in (config, other)]
    (mine, optimizer, _), (theirs, second, counts) = results
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    states = [[o.state[p] for group in o.param_groups for p in group["params"]] for o in (optimizer, second)]
    for state, twin in zip(*states, strict=True):
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(twin[key])), key
    return counts


QUICK = ["SGD nesterov", "AdamW", "AdamW one by one", "Adagrad"]


def each_kind(kinds: list[str]) -> None:
    for kind in kinds:
        counts = same(HERE, THERE, lambda p, kind=kind: make_optimizer(kind, p), steps=2)
        assert all(count > 3 for count in counts), f"{kind}: not by lane"
    whole = same(HERE, THERE, lambda p: Counted(p, lr=1e-3))
    assert whole == [0, 0, 0]  # taken as one, by the hooked step


def test_a_step_by_lane_has_the_bits_of_a_whole_step(ranks):
    ranks(2)(each_kind, QUICK)


@pytest.mark.slow
def test_every_optimizer_of_torch_steps_by_lane_with_the_bits_of_whole_steps(ranks):
    ranks(2)(each_kind, [kind for kind in KINDS if kind not in QUICK])


def see(model: Any, optimizer: Any) -> None:
    """Put hooks on that change gradients before a step and look at everything after it; with a scheduler."""
    lists = [group["params"] for group in optimizer.param_groups]
    sizes = [len(params) for params in lists]

    def halve(which: Any, args: Any, kwargs: Any) -> None:
        for group in which.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def look(which: Any, args: Any, kwargs: Any) -> None:
        assert [len(group["params"]) for group in which.param_groups] == sizes
        assert all(group["params"] is params for group, params in zip(which.param_groups, lists, strict=True))
        assert all(p.grad is not None for params in lists for p in params)

    from ourshard.runtime.optim import adopt_optimizer

    adopt_optimizer(optimizer)
    sizes[:] = [len(params) for params in lists]
    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(look)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def hooked() -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [{"params": parameters[:4], "weight_decay": 0.0}, {"params": parameters[4:], "lr": 1e-2}]
        return torch.optim.AdamW(groups, lr=1e-3)

    counts = same(HERE, THERE, two_groups, see)
    assert all(count > 3 for count in counts)


def test_hooks_run_before_and_after_all_lanes_and_see_whole_groups(ranks):
    ranks(2)(hooked)


def closed(config: dict[str, Any]) -> Any:
    from ourshard import full_state_dict, shard_model

    model = shard_model(toy(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = square_loss(model, part(joined(step)))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, full_state_dict(model)


def test_a_closure_makes_its_gradients_inside_of_the_step(ranks):
    for (losses, mine), (others, theirs) in zip(ranks(2)(closed, HERE), ranks(2)(closed, THERE), strict=True):
        assert losses == others
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def failing() -> None:
    from ourshard import shard_model

    model = shard_model(toy(), THERE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square_loss(model, part(joined(0))).backward()
    optimizer.step()
    groups = [list(group["params"]) for group in optimizer.param_groups]
    square_loss(model, part(joined(1))).backward()
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "no number"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        assert all(p is q for p, q in zip(group["params"], before, strict=True))
        assert all(p.grad is not None for p in before)
        group["lr"] = rate
    assert optimizer.step() is None
    assert not [hooks for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks) if hooks]


def test_a_step_that_fails_leaves_groups_and_gradients_as_they_were(ranks):
    ranks(2)(failing)


def written() -> list[float]:
    """Write values right after a step, whose masters went up already."""
    from ourshard import full_state_dict, gathered, shard_model

    model = shard_model(toy(), THERE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square_loss(model, part(joined(0))).backward()
    optimizer.step()
    model.load_state_dict({n: torch.full_like(v, 2.0) for n, v in full_state_dict(model).items()})
    with gathered(model):
        return [p.float().mean().item() for p in model.parameters()]


def test_what_is_written_after_a_step_is_what_the_next_forward_sees(ranks):
    for means in ranks(2)(written):
        assert set(means) == {2.0}


def norms() -> list[float]:
    """Return norms of gradients as they came, halved by the user, and with some of them dropped; and as recomputed."""
    from ourshard import clip_grad_norm_, engine_of, shard_model

    model = shard_model(toy(), THERE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square_loss(model, part(joined(0))).backward()
    engine = engine_of(model)
    assert engine is not None
    lanes = [lane for lane in engine.lanes() if lane.offloaded]
    assert lanes
    assert all(lane.norms_of(lane.gradient) is not None for lane in lanes)
    found = [clip_grad_norm_(model, 1e9).item()]
    optimizer.step()  # adopts
    assert clip_grad_norm_(model, 1e9).item() == found[0]
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.data.mul_(0.5)  # which torch does not count
    assert all(lane.norms_of(lane.gradient) is None for lane in lanes)
    found.append(clip_grad_norm_(model, 1e9).item())
    return found


def test_norms_taken_as_gradients_go_down_are_not_used_once_anyone_wrote_to_them(ranks):
    for first, half in ranks(2)(norms):
        assert half == pytest.approx(first / 2, rel=1e-6)
