"""D01, D03, I05: parameters and branches that some ranks, or all, do not use."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import WIDTH, Block
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, adamw, momentum

pytestmark = pytest.mark.ranks

CONFIGS = {**TOY, "whole": {"stage": 3, "persist_below": 0, "reshard_after_forward": False}}
LATE = {
    "released": {"stage": 3, "persist_below": 0},
    "whole": CONFIGS["whole"],
    "deep prefetch": {"stage": 3, "persist_below": 0, "prefetch": {"forward": 3, "backward": 2}},
}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


class Tower(nn.Module):
    """A trunk with a branch (a vision tower) that runs for rows that have a picture, and a parameter nobody uses."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.ModuleList([Block(), Block()])
        self.trunk = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.tower.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        if pictures.any():
            seen = x
            for block in self.tower:
                seen = block(seen)
            x = torch.where(pictures[:, None], seen, x)
        for block in self.trunk:
            x = block(x)
        return self.head(x)


def frozen_tower() -> Tower:
    return Tower(frozen=True)


def skip_a_tower(config: dict[str, Any], make: Any, wants: list[list[int]]) -> None:
    """Step k: the ranks in `wants[k]` have pictures. The plain model sees all rows at once."""
    both = pair({**config, "wrap": {"classes": ["Block"]}}, make, momentum)
    world = dist.get_world_size()
    for step, ranks_with in enumerate(wants):
        rows = joined(step)
        pictures = torch.zeros(len(rows), dtype=torch.bool)
        for rank in ranks_with:
            pictures.chunk(world)[rank][:] = True
        both.zero_grad()
        (both.plain(rows, pictures) - rows).square().mean().backward()
        (both.sharded(part(rows), part(pictures)) - part(rows)).square().mean().backward()
        both.assert_same_gradients()
        both.step()
    both.assert_same()


@EVERY
@pytest.mark.parametrize("make", [Tower, frozen_tower], ids=["trainable", "frozen"])
def test_a_branch_that_some_ranks_skip_then_all_then_none(ranks, config, make):
    """D03, from the first step: rank 0 alone, nobody, all, rank 1 alone. A branch nobody uses has no gradient."""
    ranks(2)(skip_a_tower, config, make, [[0], [], [0, 1], [1], [], [0]])


@EVERY
def test_a_branch_that_comes_to_life_later_on_all_ranks(ranks, config):
    ranks(2)(skip_a_tower, config, Tower, [[], [], [0, 1], [0, 1], []])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_branch_that_comes_to_life_on_one_rank_works_up_to_stage_2(ranks, stage):
    ranks(2)(skip_a_tower, {"stage": stage, "persist_below": 0}, Tower, [[], [], [1], [0], [0, 1]])


@pytest.mark.parametrize("config", LATE.values(), ids=LATE)
@pytest.mark.parametrize("make", [Tower, frozen_tower], ids=["trainable", "frozen"])
def test_a_branch_that_comes_to_life_on_one_rank_works_at_stage_3(ranks, config, make):
    """D03: the record of the first steps lacks the branch; its gathers come into it when one rank needs them."""
    ranks(2)(skip_a_tower, config, make, [[], [], [1], [0], [0, 1], [], [1]])


def call_a_tower_alone() -> None:
    """The ranks part in a forward; then all call a block of the tower by itself, as `generate` of some models does."""
    both = pair({"stage": 3, "persist_below": 0, "wrap": {"classes": ["Block"]}}, Tower)
    rows = part(joined(0))
    for ranks_with in ([0], [1]):
        both.sharded(rows, torch.tensor([dist.get_rank() in ranks_with] * len(rows))).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(both.sharded.tower[0](rows), both.plain.tower[0](rows))  # type: ignore[index]


def test_a_block_is_called_alone_after_a_forward_in_which_ranks_parted(ranks):
    ranks(2)(call_a_tower_alone)


class Branch(nn.Module):
    """A branch whose part of the loss some ranks leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, counts: bool) -> torch.Tensor:
        for block in self.trunk:
            x = block(x)
        seen = self.branch[1](self.branch[0](x))
        return x.square().mean() + (seen if counts else seen.detach()).square().mean()


def leave_out_a_loss(wants: list[list[bool]]) -> None:
    """Step k: rank r has the branch in its loss if `wants[k][r]`."""
    both = pair({"stage": 3, "persist_below": 0, "wrap": {"classes": ["Block"]}}, Branch, momentum)
    for step, counts in enumerate(wants):
        both.zero_grad()
        for rows, counted in zip(joined(step).chunk(2), counts, strict=True):
            (both.plain(rows, counted) / 2).backward()
        both.sharded(part(joined(step)), counts[dist.get_rank()]).backward()
        both.assert_same_gradients()
        both.step()
    both.assert_same()


def test_a_branch_whose_gradients_come_on_one_rank_later(ranks):
    no, yes = False, True
    ranks(2)(leave_out_a_loss, [[no, no], [no, no], [no, yes], [yes, no], [yes, yes], [no, no]])


class Looped(nn.Module):
    """Calls its first block as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.blocks[0](x)
        return self.blocks[1](x)


def call_once_more_on_rank_1() -> None:
    from ourshard import shard_model

    model = shard_model(Looped(), {"stage": 3, "persist_below": 0, "wrap": {"classes": ["Block"]}})
    for times in (2, 2, 2 + dist.get_rank()):
        model(part(joined(0)), times).sum().backward()


def test_a_module_that_one_rank_calls_more_often_than_all_did_is_an_error_that_names_it(ranks):
    """A gather that the record does not have can't be joined where ranks do not meet; all hear who is where."""
    result = ranks(2, fresh=True)(call_once_more_on_rank_1)
    assert all(code != 0 for code in result.exitcodes)
    assert "gather unit 0 (blocks.0)" in result.stderr[1]
    assert "DesyncError" in result.stderr[1]
    assert "make the module around it the unit" in result.stderr[1]


class Experts(nn.Module):
    """Four experts of which each row uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = choice == number
            if mine.any():
                out[mine] = expert(x[mine])
        return x + out


class Mixture(nn.Module):
    """Two layers of experts between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.checkpointing: bool | None = None  # None: no; else `use_reentrant`

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x, choice)
            else:
                x = checkpoint(layer, x, choice, use_reentrant=self.checkpointing)
        return self.last(x)


def route(config: dict[str, Any], checkpointing: bool | None, wrap: str) -> None:
    both = pair({**config, "wrap": {"classes": [wrap]}} if wrap else config, Mixture, adamw)
    both.plain.checkpointing = both.sharded.checkpointing = checkpointing
    for step in range(5):
        rows = joined(step)
        # Rank 0 uses experts 0 and 1, rank 1 the others; in odd steps experts 1 and 3 get nothing anywhere.
        choice = torch.tensor([0, 0, 2, 2] if step % 2 else [0, 1, 2, 3])
        both.zero_grad()
        for model, x, c in ((both.plain, rows, choice), (both.sharded, part(rows), part(choice))):
            (model(x, c) - x).square().mean().backward()
        both.assert_same_gradients()
        both.step()
    both.assert_same()


@EVERY
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_experts_that_ranks_skip_give_the_gradients_of_one_process(ranks, config, checkpointing):
    """D01, with no config: the unit is the layer, since a list of experts is passed over."""
    ranks(2)(route, config, checkpointing, "")


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_as_units_of_their_own_that_ranks_skip(ranks, stage, checkpointing):
    """D01 at its hardest: each expert is gathered alone, and the first step already differs between ranks."""
    ranks(2)(route, {"stage": stage, "persist_below": 0}, checkpointing, "Block")


def wake_experts(checkpointing: bool | None) -> None:
    both = pair({"stage": 3, "persist_below": 0, "wrap": {"classes": ["Block"]}}, Mixture, adamw)
    both.plain.checkpointing = both.sharded.checkpointing = checkpointing
    asked = []
    for step, used in enumerate(["0000", "0000", "0010", "0023", "3210", "0000", "0033", "1122", "0000"]):
        rows, choice = joined(step), torch.tensor([int(number) for number in used])
        both.zero_grad()
        before = both.engine.control.agreements
        for model, x, c in ((both.plain, rows, choice), (both.sharded, part(rows), part(choice))):
            (model(x, c) - x).square().mean().backward()
        asked.append(both.engine.control.agreements - before)
        both.assert_same_gradients()
        both.step()
    both.assert_same()
    assert all(count <= 2 for count in asked[-4:]), (
        asked
    )  # the records have all experts: the ranks meet, and that is all


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_experts_that_come_to_life_one_by_one(ranks, checkpointing):
    """D01: one expert alone in the first steps, then others on this rank or that."""
    ranks(2)(wake_experts, checkpointing)


class Routed(nn.Module):
    """Two layers of six experts, called in the order that a caller gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleList([Block() for _ in range(6)]) for _ in range(2)])

    def forward(self, x: torch.Tensor, orders: list[list[int]]) -> torch.Tensor:
        for layer, order in zip(self.layers, orders, strict=True):
            for number in order:
                x = x + 0.1 * layer[number](x)  # type: ignore[index]
        return x


def route_at_random(config: dict[str, Any], seed: int) -> None:
    """In each step each rank calls other experts in another order, some of them twice."""
    random, world = Random(seed), dist.get_world_size()
    both = pair({**config, "wrap": {"classes": ["Block"]}}, Routed, momentum)
    for step in range(12):
        both.zero_grad()
        orders = [[random.choices(range(6), k=random.randint(1, 4)) for _ in range(2)] for _ in range(world)]
        for rows, order in zip(joined(step).chunk(world), orders, strict=True):
            ((both.plain(rows, order) - rows).square().mean() / world).backward()
        mine = part(joined(step))
        (both.sharded(mine, orders[dist.get_rank()]) - mine).square().mean().backward()
        both.assert_same_gradients(2e-6)
        both.step()
    both.assert_same(2e-6)


@pytest.mark.parametrize("config", LATE.values(), ids=LATE)
def test_experts_in_any_order_and_number_on_each_rank(ranks, config):
    """D01, with units of one expert each: what one rank wants, another may want later, twice or never."""
    ranks(2)(route_at_random, config, 1)


def joined_gathers_do_not_pile_up() -> list[int]:
    """Return peak slot bytes: all experts used by every rank, then only one of them."""
    from ourshard import engine_of, shard_model

    model = shard_model(Mixture(), {"stage": 3, "persist_below": 0, "wrap": {"classes": ["Block"]}, "ledger": True})
    ledger = engine_of(model).ledger  # type: ignore[union-attr]
    peaks = []
    rows = torch.randn(4, WIDTH)
    for step, choice in enumerate([[0, 1, 2, 3]] * 3 + [[0] * 4] * 2):
        if step in (2, 4):
            ledger.reset()
        model(rows, torch.tensor(choice)).square().mean().backward()
        if step in (2, 4):
            peaks.append(ledger.peak["slot"])
    return peaks


def test_units_that_are_gathered_only_because_others_need_them_are_let_go_again(ranks):
    for used, skipped in ranks(2)(joined_gathers_do_not_pile_up):
        assert skipped <= 2 * used  # the root, one in use, one ahead, and one passed by
