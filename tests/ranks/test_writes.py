"""F11 and A12: writing into parameters at rest, and the tensors of a state dict given to those who save them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, sgd

pytestmark = pytest.mark.ranks

Write = Callable[[torch.Tensor], Any]

WRITES: dict[str, Write] = {
    "data.copy_": lambda w: w.data.copy_(torch.linspace(0, 1, w.numel()).view(w.shape)),
    "detach().fill_": lambda w: w.detach().fill_(0.5),
    "copy_": lambda w: w.copy_(torch.linspace(0, 1, w.numel()).view(w.shape)),
    "add_": lambda w: w.add_(1),
    "+=": lambda w: w.__iadd__(1),
    "mul_": lambda w: w.mul_(0.5),
    "zero_": lambda w: w.zero_(),
    "rows": lambda w: w[-3:].fill_(0.25),
    "rows of data": lambda w: w.data[-3:].fill_(0.25),
    "row mean": lambda w: w.__setitem__(slice(-3, None), w.mean(0)),
    "clamp_": lambda w: w.data.clamp_(-0.1, 0.1),
    "lerp_": lambda w: w.lerp_(torch.zeros(w.shape), 0.1),
    "add_ of a whole tensor": lambda w: w.data.add_(torch.ones(w.shape), alpha=-0.1),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "init": lambda w: nn.init.constant_(w, 0.125),
}
ALWAYS_RIGHT = {"data.copy_", "detach().fill_", "copy_", "add_", "+=", "mul_", "zero_", "foreach"}


def write(config: dict[str, Any]) -> dict[str, str]:
    """Write into one weight in every way, between two steps; return what was refused and why."""
    refused = {}
    for name, change in WRITES.items():
        both = pair(config, toy, sgd)
        both.backward(joined(0))
        both.step()
        both.zero_grad()
        weights = [max(model.parameters(), key=lambda p: p.numel()) for model in (both.plain, both.sharded)]
        with torch.no_grad():
            try:
                change(weights[1])
            except RuntimeError as error:
                refused[name] = str(error)
            else:
                change(weights[0])
        both.assert_same()  # a write that was refused changed nothing
        both.backward(joined(1))
        both.step()
        both.assert_same()  # and one that was not is in the master too
    return refused


class Scaled(nn.Module):
    """A scalar beside a toy, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toy()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.toy(x) * self.scale + self.shift


def write_scalars() -> None:
    both = pair(TOY["stage 3"], Scaled, sgd)
    with torch.no_grad():
        for model in (both.plain, both.sharded):
            model.scale.mul_(1.5)
            model.shift.add_(torch.tensor(0.25)).clamp_(max=0.3)
            model.shift.sub_(model.shift)
        with pytest.raises(RuntimeError, match=r"use `with ourshard\.gathered"):
            both.sharded.toy.first.weight.mul_(both.sharded.scale)
    both.backward(joined(0))
    both.step()
    both.assert_same()


def test_a_scalar_is_written_to_as_others_are(ranks):
    ranks(2)(write_scalars)


@pytest.mark.parametrize("config", TOY.values(), ids=TOY.keys())
def test_a_write_into_a_resting_parameter_is_right_or_refused_by_name(ranks, config):
    for refused in ranks(2)(write, config):
        assert not ALWAYS_RIGHT & refused.keys()
        if config["stage"] == 0:
            assert not refused
        for message in refused.values():
            assert "gathered(model)" in message
            assert "writeback=True" in message


def write_in_blocks(config: dict[str, Any]) -> None:
    """Write into a weight in every way in a block that writes back: one that was held before, of a model or alone."""
    from ourshard import gathered

    for name, change in WRITES.items():
        for alone, reads in ((False, False), (True, False), (False, True)):
            both = pair(config, toy, sgd)
            both.train(1)
            kept, weight = (max(model.parameters(), key=lambda p: p.numel()) for model in (both.plain, both.sharded))
            with gathered([weight] if alone else both.sharded, writeback=True), torch.no_grad():
                before = weight.clone() if reads else None
                change(weight)
                change(kept)
                torch.testing.assert_close(weight.clone(), kept, atol=1e-6, rtol=0, msg=name)
                if before is not None:
                    weight.copy_(weight + before)
                    kept.copy_(kept + before)
            both.assert_same()
            both.train(1, first=1)
            both.assert_same()


@pytest.mark.parametrize("config", TOY.values(), ids=TOY.keys())
def test_a_write_into_a_parameter_that_was_held_before_its_block_is_written_back(ranks, config):
    """It was undone at the block's end by the leaf in its module, without a word, or refused as if at rest."""
    ranks(2)(write_in_blocks, config)


def draw_on_one_rank() -> None:
    from ourshard import gathered

    both = pair(TOY["stage 3"], toy, sgd)
    weight = both.sharded.first.weight
    with gathered([weight], writeback=True, modifier_rank=1):
        if dist.get_rank() == 1:
            torch.manual_seed(5)
            assert nn.init.normal_(weight) is weight
    torch.manual_seed(5)
    nn.init.normal_(both.plain.first.weight)
    both.assert_same()


def test_one_rank_draws_a_parameter_anew_for_all(ranks):
    """As under DeepSpeed's GatheredParameters."""
    ranks(2)(draw_on_one_rank)


def write_groups(config: dict[str, Any]) -> None:
    """Change masters by the groups of the optimizer: before a forward, an evaluation, `gathered`, and the next step."""
    from ourshard import gathered

    both = pair(config, toy, sgd)
    models, optimizers = (both.plain, both.sharded), (both.plain_optimizer, both.optimizer)
    for step in range(4):
        both.backward(joined(step))
        both.step()
        both.zero_grad()
        with torch.no_grad():
            for optimizer in optimizers:
                for p in [p for group in optimizer.param_groups for p in group["params"]]:
                    p.mul_(0.9)
            if step == 1:
                shown = [model(joined(9)) for model in models]
                torch.testing.assert_close(shown[1], shown[0], atol=1e-6, rtol=0)
            elif step == 2:
                shown = [model.blocks[1](joined(9)) for model in models]
                torch.testing.assert_close(shown[1], shown[0], atol=1e-6, rtol=0)
            elif step == 3:
                both.plain.last.weight[0].zero_()
                with gathered(both.sharded, writeback=True):
                    both.sharded.last.weight[0].zero_()
    both.train(1, first=4)
    both.assert_same()


TIERS = {
    "host": {"stage": 2, "persist_below": 0, "offload": {"optimizer": "cpu"}},
    "shard beside the host": {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu"}},
}


@pytest.mark.parametrize("config", [*TOY.values(), *TIERS.values()], ids=[*TOY, *TIERS])
def test_what_is_written_to_the_groups_of_an_optimizer_is_in_the_next_forward(ranks, config):
    ranks(2)(write_groups, config)


def test_a_secondary_shard_follows_writes_to_groups(ranks):
    ranks(4)(write_groups, {"stage": 3, "persist_below": 0, "secondary_shard_size": 2})


def save_by_hand(stage: int, folder: Path) -> None:
    """Save what a user may get hold of with safetensors itself: whole tensors that share nothing, or a refusal."""
    import ourshard
    from safetensors.torch import load_file, save_file

    plain = toy().state_dict()
    model = ourshard.shard_model(toy(), {"stage": stage, "persist_below": 0})
    square_loss(model, part(joined(0))).backward()
    state = ourshard.full_state_dict(model)
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(plain)
    file = str(folder / f"{dist.get_rank()}.safetensors")
    save_file(state, file)
    torch.testing.assert_close(load_file(file), dict(plain), rtol=0, atol=0)
    if stage:
        with pytest.raises(RuntimeError, match="full_state_dict"):
            save_file(model.state_dict(), file + ".refused")
        assert not Path(file + ".refused").exists()
    else:
        save_file(model.state_dict(), file)
        torch.testing.assert_close(load_file(file), dict(plain), rtol=0, atol=0)


@pytest.mark.parametrize("stage", range(4))
def test_a_state_dict_saved_by_hand_is_whole_or_refused(ranks, tmp_path, stage):
    ranks(2)(save_by_hand, stage, tmp_path)


class TiedToys(nn.Module):
    """Two names of one weight, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toy()
        self.again = nn.Linear(*reversed(self.toy.first.weight.shape), bias=False)
        self.again.weight = self.toy.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.toy(x) + self.again(x).sum()


def save_by_libraries(stage: int, folder: Path) -> None:
    """Save state dicts of whole parameters by what takes one storage for one tensor; write and keep them too."""
    import ourshard
    from accelerate.utils import save
    from safetensors.torch import load_file, load_model, save_model

    plain = TiedToys()
    model = ourshard.shard_model(TiedToys(), {"stage": stage, "persist_below": 20})
    one, two = (str(folder / f"{dist.get_rank()}.{number}.safetensors") for number in (1, 2))
    with ourshard.gathered(model):
        save(model.state_dict(), one, safe_serialization=True)
        save(model.toy.state_dict(), two, safe_serialization=True)
        kept = model.state_dict()
        torch.save(kept["toy.first.weight"], one + ".bin")
    wanted = {name: value for name, value in plain.state_dict().items() if name != "again.weight"}
    torch.testing.assert_close(load_file(one), wanted, rtol=0, atol=0)
    torch.testing.assert_close(load_file(two), plain.toy.state_dict(), rtol=0, atol=0)
    assert Path(one + ".bin").stat().st_size < kept["toy.first.weight"].nbytes + 2000
    with ourshard.gathered(model, writeback=True):
        save_model(model, one)
        tied = model.state_dict()
        tied["again.weight"].mul_(2)
        assert tied["again.weight"].untyped_storage()._cdata == tied["toy.first.weight"].untyped_storage()._cdata
    loaded = TiedToys()
    load_model(loaded, one)
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=0, atol=0)
    twice = ourshard.full_state_dict(model)["toy.first.weight"]
    assert torch.equal(twice, 2 * wanted["toy.first.weight"])
    square_loss(model, part(joined(0))).backward()
    if stage:  # as it was in the block, whatever has become of the memory of the unit
        assert torch.equal(kept["toy.first.weight"], wanted["toy.first.weight"] * (2 if stage < 3 else 1))


@pytest.mark.parametrize("stage", range(4))
def test_a_state_dict_of_whole_parameters_shares_memory_by_ties_alone(ranks, tmp_path, stage):
    """A12."""
    ranks(2)(save_by_libraries, stage, tmp_path)
