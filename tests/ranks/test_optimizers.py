"""Any optimizer that treats elements one by one, made before or after sharding; unknown others are refused (X08)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import Pair, joined, pair, part
from tests.ranks.training import TOY, adamw, momentum

pytestmark = pytest.mark.ranks

CONFIGS = TOY
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

THERE = {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu"}}

# `eps` far above rounding: see `training.adamw`. Rprop and the like step by the sign of a gradient, so their parity is
# held only where no gradient is near zero, which three steps of the toy give.
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 1e-3, "eps": 1e-4, "amsgrad": True},
    "AdamW": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1},
    "AdamW foreach": {"lr": 1e-3, "eps": 1e-4, "foreach": True},
    "AdamW one by one": {"lr": 1e-3, "eps": 1e-4, "foreach": False},
    "NAdam": {"lr": 1e-3, "eps": 1e-4},
    "RAdam": {"lr": 1e-3, "eps": 1e-4},
    "Adamax": {"lr": 1e-3, "eps": 1e-4},
    "Adagrad": {"lr": 1e-2, "eps": 1e-4},
    "Adadelta": {"lr": 0.1, "eps": 1e-4},
    "RMSprop": {"lr": 1e-3, "eps": 1e-4, "momentum": 0.9, "centered": True},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 1e-3},
}


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, kind.split(maxsplit=1)[0])(parameters, **KINDS[kind])


def each_kind(config: dict[str, Any], when: str) -> None:
    from ourshard import shard_model

    for kind in KINDS:
        plain, model = toy(), toy()
        wanted = make_optimizer(kind, plain.parameters())
        if when != "after":
            optimizer = make_optimizer(kind, model.parameters())
        if when == "with state":
            for m, o in ((plain, wanted), (model, optimizer)):
                square_loss(m, joined(50)).backward()
                o.step()
                o.zero_grad()
        shard_model(model, config)
        if when == "after":
            optimizer = make_optimizer(kind, model.parameters())
        both = Pair(plain, model, wanted, optimizer)
        both.train(3)
        try:
            both.assert_same(2e-6)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error


@EVERY
@pytest.mark.parametrize("when", ["before", "after", "with state"])
def test_every_optimizer_of_torch_that_is_elementwise(ranks, config, when):
    ranks(2)(each_kind, config, when)


def refuse(config: dict[str, Any], kind: str) -> str:
    from ourshard import adopt_optimizer, shard_model

    model = shard_model(toy(), config)
    try:
        adopt_optimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.01))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["LBFGS"])
def test_optimizers_that_need_all_parameters_at_once_are_refused_by_name(ranks, stage, kind):
    """X08."""
    for message in ranks(2)(refuse, {"stage": stage, "persist_below": 0}, kind):
        assert kind in message
        assert "stage 0" in message


def groups(config: dict[str, Any]) -> None:
    """Two groups by hand, a scheduler that holds the dicts, and a rate changed from outside."""
    both = pair(config, toy, adamw)
    for name, model in (("plain_optimizer", both.plain), ("optimizer", both.sharded)):
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        made = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 1e-2}], lr=1e-3, eps=1e-4
        )
        setattr(both, name, made)
    kept = list(both.optimizer.param_groups)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (both.plain_optimizer, both.optimizer)]
    for step in range(4):
        both.train(1, first=step)
        for scheduler in schedulers:
            scheduler.step()
        if step == 2:
            for optimizer in (both.plain_optimizer, both.optimizer):
                optimizer.param_groups[0]["weight_decay"] = 0.0
                optimizer.param_groups[1]["lr"] = 0.5e-3
    both.assert_same()
    assert all(a is b for a, b in zip(kept, both.optimizer.param_groups, strict=True))
    assert [g["lr"] for g in both.optimizer.param_groups] == [g["lr"] for g in both.plain_optimizer.param_groups]


@EVERY
def test_groups_keep_identity_rates_and_decay_under_schedulers(ranks, config):
    ranks(2)(groups, config)


def late_group(config: dict[str, Any]) -> None:
    both = pair(config, toy, adamw)
    for name, model in (("plain_optimizer", both.plain), ("optimizer", both.sharded)):
        setattr(both, name, adamw(model.blocks.parameters()))
    both.train(2)
    for model, optimizer in ((both.plain, both.plain_optimizer), (both.sharded, both.optimizer)):
        optimizer.add_param_group({"params": [*model.first.parameters(), *model.last.parameters()], "lr": 5e-3})
    both.train(3, first=2)
    both.assert_same()


@EVERY
def test_a_group_added_after_some_steps(ranks, config):
    ranks(2)(late_group, config)


def two_optimizers(config: dict[str, Any]) -> None:
    both = pair(config, toy, adamw)
    pairs = []
    for model in (both.plain, both.sharded):
        first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        second = adamw([*model.first.parameters(), *model.last.parameters()])
        pairs.append((first, second))
    for step in range(4):
        both.backward(joined(step))
        for first, second in pairs:
            first.step()
            if step % 2:  # the second accumulates over two steps
                second.step()
                second.zero_grad()
            first.zero_grad()
    both.assert_same()


@EVERY
def test_two_optimizers_for_parts_of_a_model_with_rhythms_of_their_own(ranks, config):
    ranks(2)(two_optimizers, config)


def replaced_optimizer() -> tuple[str, bool]:
    from ourshard import shard_model

    model = shard_model(toy(), {"stage": 3, "persist_below": 0})
    old, new = adamw(model.parameters()), adamw(model.parameters())
    square_loss(model, part(joined(0))).backward()
    old.step()
    new.step()
    message = ""
    try:
        old.step()
    except RuntimeError as error:
        message = str(error)
    del old
    square_loss(model, part(joined(1))).backward()  # the old one is gone: nothing may ask for it
    other = shard_model(toy(), {"stage": 3, "persist_below": 0})
    gone = adamw(other.parameters())
    square_loss(other, part(joined(0))).backward()
    gone.step()
    next(other.parameters()).grad = None
    del gone  # before it knew that one gradient of several is gone
    new.step()
    return message, True


def test_an_optimizer_whose_parameters_went_to_another_says_so(ranks):
    for message, went_on in ranks(2)(replaced_optimizer):
        assert "no longer steps anything" in message
        assert went_on


def in_groups(model: nn.Module, first: int) -> torch.optim.Optimizer:
    """Return an optimizer with the first parameters in a group of their own."""
    parameters = list(model.parameters())
    groups = [group for group in (parameters[:first], parameters[first:]) if group]
    return momentum([{"params": group} for group in groups])


def replaced_between_backward_and_step(config: dict[str, Any]) -> None:
    """Make a new optimizer once a backward has given the old one gradients."""
    from ourshard import gathered

    both = pair(config, optimizer=momentum)
    both.train(1)
    for number, first in ((1, 0), (2, 3), (3, 0)):
        both.zero_grad()
        both.backward(joined(number))
        both.plain_optimizer, both.optimizer = (in_groups(model, first) for model in (both.plain, both.sharded))
        if first:
            with gathered(both.sharded):  # a backward that leaves the last layers out, and the new optimizer unknown
                both.backward(joined(number + 5), lambda model, x: model.blocks[0](model.first(x)).square().mean())
        both.step()
    both.assert_same()


@pytest.mark.parametrize("config", [*TOY.values(), THERE], ids=[*TOY, "on the host"])
def test_an_optimizer_may_be_replaced_between_backward_and_step(ranks, config):
    ranks(2)(replaced_between_backward_and_step, config)


class Doubled(torch.optim.Optimizer):
    """A user's own optimizer, elementwise and without foreach."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) * 0.5 + p.grad
                    p.sub_(state["sum"] * group["lr"])


class Normed(Doubled):
    """Scales each step by the norm of the whole gradient, as LAMB does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6) * group["lr"])


def own_optimizer(config: dict[str, Any]) -> str:
    from ourshard import adopt_optimizer

    both = pair(config, toy, Doubled)
    both.train(3)
    both.assert_same()
    try:
        adopt_optimizer(Normed(both.sharded.parameters()))
    except ValueError as error:
        return str(error)
    return ""


@EVERY
def test_a_users_own_optimizer_works_or_is_refused_by_what_it_does(ranks, config):
    """X08: the probe sees that a norm over a whole matrix is another over a part of it."""
    for message in ranks(2)(own_optimizer, config):
        assert ("Normed" in message) == (config["stage"] > 0)


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and goes half of the way each second time. torch's constructor is not called."""

    elementwise = True

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        self.steps += 1
        for p in [p for group in self.param_groups for p in group["params"]]:
            slow = self.state[p].setdefault("slow", p.clone())
            if self.steps % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))


def lookahead(parameters: Any) -> torch.optim.Optimizer:
    return Lookahead(momentum(parameters))


def wrapping_optimizer(config: dict[str, Any]) -> None:
    from ourshard import adopt_optimizer

    for early in (True, False):
        both = pair(config, toy, lookahead)
        if early:
            adopt_optimizer(both.optimizer)
        both.train(5)
        both.assert_same()


@pytest.mark.parametrize("config", [*CONFIGS.values(), THERE], ids=[*CONFIGS.keys(), "offload"])
def test_an_optimizer_around_another_steps_as_in_one_process(ranks, config):
    ranks(2)(wrapping_optimizer, config)


def step_in_backward(config: dict[str, Any]) -> str:
    """Give each parameter an optimizer, which a hook steps as soon as the gradient is there."""
    from ourshard import shard_model

    model = shard_model(toy(), config)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        optimizers[parameter].step()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with pytest.raises(RuntimeError) as caught:
        square_loss(model, part(joined(0))).backward()
    return str(caught.value)


@EVERY
def test_a_step_inside_of_a_backward_is_refused_on_every_rank(ranks, config):
    """The hook gets the user's parameter, with this rank's gradient; ranks would step by gradients that differ."""
    for message in ranks(2)(step_in_backward, config):
        assert "inside of a backward" in message


def state_dicts(config: dict[str, Any]) -> dict[str, str]:
    """Load state dicts of the same rank, of the other one, and of a plain optimizer; return what was refused."""
    import torch.distributed as dist

    both = pair(config, toy, adamw)
    both.train(2)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, both.optimizer.state_dict())
    mine, theirs = everyone[dist.get_rank()], everyone[1 - dist.get_rank()]
    both.optimizer.load_state_dict(mine)
    both.train(2, first=2)
    both.assert_same(2e-6)
    refused = {}
    for name, state in (("theirs", theirs), ("plain", both.plain_optimizer.state_dict())):
        try:
            both.optimizer.load_state_dict(state)
        except ValueError as error:
            refused[name] = str(error)
    return refused


@EVERY
def test_a_state_dict_of_an_optimizer_loads_over_the_rows_that_it_is_of(ranks, config):
    """A02: the file of rank 0 on all ranks gave the others its moments."""
    for rank, refused in enumerate(ranks(2)(state_dicts, config)):
        whole = config["stage"] == 0
        assert set(refused) == (set() if whole else {"theirs", "plain"})
        if not whole:
            assert f"the rows of rank {1 - rank}, and rank {rank} steps other rows" in refused["theirs"]
            assert "of whole parameters" in refused["plain"]
            assert all("save_state" in text for text in refused.values())
