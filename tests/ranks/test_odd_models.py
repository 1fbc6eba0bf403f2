"""Models whose modules do what few do: hand results on in odd ways, have sparse gradients, update buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime.api import engine_of, shard_model
from torch import nn

from tests.ranks.nets import WIDTH, Block, numbers, square_loss
from tests.ranks.training import TOY, Configs, Task, compare, reference, sgd, with_each

pytestmark = pytest.mark.ranks

ENDS: Configs = {name: TOY[name] for name in ("stage 0", "stage 3")}
ROWS = 19  # of an embedding


class Kept(Block):
    """A block that returns nothing: its result stays in an attribute."""

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.result = super().forward(x)


class Added(Block):
    """A block that adds its result to a list it was given."""

    def forward(self, results: list[torch.Tensor]) -> None:  # type: ignore[override]
        results.append(super().forward(results[-1]))


class Routed(Block):
    """A block that keeps a loss of its own, made last, beside what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.loss = self.up(x).pow(2).mean()
        return x


class Overwriting(Block):
    """A block that changes its input in place before it does anything else; the caller goes on with the changed one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.5
        return super().forward(nn.functional.relu(x, inplace=True))


class Residual(nn.Module):
    """A linear layer, then blocks that change what is added to their results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Overwriting() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + 0.2 * block(x)
        return x


class Filling(Block):
    """A block that puts a loss of its own, one a row, into a list it was given; an odd one hands its input on."""

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor], odd: bool) -> torch.Tensor:  # type: ignore[override]
        result = super().forward(x)
        losses.append(self.up(result).pow(2).mean(1, keepdim=True))
        return x if odd else result


class Filled(nn.Module):
    """Three such blocks, whose losses are in the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Filling() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, losses, number % 2 == 1)
        return x + torch.stack(losses).sum(0)


class Forces(nn.Module):
    """A model of energies whose result is their slope: a backward inside of the forward, and layers after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            positions = x.detach().requires_grad_()
            for block in self.blocks[:2]:
                positions = block(positions)
            energy = self.last(positions).pow(2).sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return self.last(self.blocks[2](x + forces))


class Odd(nn.Module):
    """Three blocks of one of these classes."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [x]
        for block in self.blocks:
            if isinstance(block, Added):
                block(results)
                continue
            returned = block(results[-1])
            results.append(block.result if isinstance(block, Kept) else returned)
        return results[-1]


def kept() -> nn.Module:
    return Odd(Kept)


def added() -> nn.Module:
    return Odd(Added)


def routed() -> nn.Module:
    return Odd(Routed)


def loss_with_those_kept(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = square_loss(model, rows)
    return loss + sum(getattr(block, "loss", torch.zeros(())) for block in model.blocks)  # type: ignore[union-attr]


def test_blocks_may_change_their_input_in_place(ranks):
    task = Task(make=Residual, loss=square_loss, optimizer=sgd, accumulate=2)
    compare(ranks(2), task, TOY, reference(task, 2))


def most_at_once(block: type[Block]) -> int:
    """Return the most bytes of whole parameters that a step holds, of a model with six of these blocks."""
    model = six(block)
    config = {"stage": 3, "persist_below": 0, "wrap": {"classes": ["Overwriting", "Block"]}, "ledger": True}
    shard_model(model, ShardConfig.from_dict(config))
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    for _ in range(3):
        engine.ledger.reset()
        square_loss(model, numbers(4, WIDTH)).backward()
    return engine.ledger.peak["slot"]


def six(block: type[Block]) -> nn.Module:
    model = Residual()
    model.blocks = nn.ModuleList([block() for _ in range(6)])
    return model


def test_a_block_that_changes_its_input_in_place_is_released_when_its_backward_is_over(ranks):
    plain, overwriting = (ranks(2)(most_at_once, block) for block in (Block, Overwriting))
    assert overwriting == plain


@pytest.mark.parametrize("make", [kept, added, routed])
def test_results_that_are_not_returned_have_their_gradients(ranks, make):
    task = Task(make=make, loss=loss_with_those_kept, optimizer=sgd)
    compare(ranks(2), task, TOY, reference(task, 2))


def test_results_that_are_put_into_arguments_have_their_gradients(ranks):
    task = Task(make=Filled, loss=square_loss, optimizer=sgd)
    compare(ranks(2), task, TOY, reference(task, 2))


class Aside(nn.Module):
    """A model that is no unit's: it puts a loss into a list it was given, and keeps one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), Block(), Block()

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        x = self.first(x)
        losses.append(self.second(x.detach()).pow(2).mean())
        self.kept = self.third(x.detach()).pow(2).mean()
        return x


def losses_aside(config: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Train with two forwards, then a backward of each, which comes to the losses aside first."""
    from ourshard import full_state_dict

    model = Aside() if config is None else shard_model(Aside(), config)
    optimizer = sgd(model.parameters())
    for step in range(2):
        totals = []
        for half in range(2):
            rows, losses = numbers(2 * step + half, 4), []
            rows = rows if config is None else rows.chunk(2)[dist.get_rank()]
            totals.append(model(rows, losses).pow(2).mean() + losses[0] + model.kept)
        for total in totals:
            total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if config is None else full_state_dict(model)


def test_losses_that_the_whole_model_puts_aside_have_their_gradients(ranks):
    wanted = losses_aside(None)
    for name, config in with_each(TOY, "one unit at", wrap={"policy": "none"}).items():
        for found in ranks(2)(losses_aside, config):
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in wanted.items()), name


def forces_without_training(config: dict[str, Any]) -> None:
    from ourshard import shard_model

    plain, model = Forces().eval(), shard_model(Forces().eval(), config)
    for number in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(numbers(number, 3)), plain(numbers(number, 3)))


def reductions_of_forces() -> tuple[int, int]:
    """Return how many reductions a forward has, with the backward inside of it, and how many the one of the loss."""
    model = shard_model(Forces(), ShardConfig.from_dict({"stage": 1, "persist_below": 0, "ledger": True}))
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    loss = square_loss(model, numbers(0, 2))
    inside = engine.ledger.reduces.total()
    loss.backward()
    return inside, engine.ledger.reduces.total() - inside


def test_a_backward_in_a_forward_reduces_nothing_where_gradients_wait_for_the_one_of_the_loss(ranks):
    for inside, after in ranks(2)(reductions_of_forces):
        assert (inside, after) == (0, 4)


def test_a_model_may_run_a_backward_in_its_forward(ranks):
    task = Task(make=Forces, loss=square_loss, optimizer=sgd, accumulate=2)
    compare(ranks(2), task, TOY, reference(task, 2))
    for config in TOY.values():
        ranks(2)(forces_without_training, config)


class Rows(nn.Module):
    """An embedding with options, and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(ROWS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids))


def sparse() -> nn.Module:
    return Rows(sparse=True)


def ids(batch: int, rows: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (rows, 4), generator=torch.Generator().manual_seed(batch))


def size_of_output(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).pow(2).mean()


def test_sparse_gradients_of_an_embedding_are_reduced_as_dense_ones(ranks):
    task = Task(make=sparse, loss=size_of_output, batch=ids, optimizer=sgd, accumulate=2)
    compare(ranks(2), task, TOY, reference(task, 2))


def sharding_of_an_embedding_with_a_norm() -> str:
    from ourshard import shard_model

    with pytest.raises(ValueError, match="max_norm") as caught:
        shard_model(Rows(max_norm=1.0), {"stage": 3})
    return str(caught.value)


def test_an_embedding_that_shortens_its_rows_in_forward_is_refused(ranks):
    for text in ranks(2)(sharding_of_an_embedding_with_a_norm):
        assert "'rows' is an Embedding with max_norm=1.0" in text
        assert "after each step" in text


class Statistics(Block):
    """A block with the statistics of a batch norm, a buffer that is made anew, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen = torch.zeros(len(x) + dist.get_rank())
        return super().forward(self.batch_norm(x))


class Pair(nn.Module):
    """Two blocks with statistics; rank `idle` skips the second."""

    def __init__(self, idle: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Statistics(), Statistics()])
        self.idle = idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return x if self.idle == dist.get_rank() else self.blocks[1](x)


def buffers_after_training(config: dict[str, Any], idle: int | None) -> list[dict[str, torch.Tensor]]:
    """Return the buffers after each of three backwards."""
    from ourshard import shard_model

    model = shard_model(Pair(idle), config)
    found = []
    for step in range(3):
        square_loss(model, numbers(step, 8).chunk(2)[dist.get_rank()]).backward()
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


@pytest.mark.parametrize("config", ENDS.values(), ids=ENDS)
def test_buffers_that_forwards_update_are_those_of_rank_0_on_all_ranks(ranks, config):
    """As under DDP; a cache that is not saved stays each rank's own, whatever its shape."""
    first, second = ranks(2)(buffers_after_training, config, None)
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert mine["blocks.0.batch_norm.num_batches_tracked"] == step + 1
        for name, buffer in mine.items():
            assert name.endswith("seen") or torch.equal(buffer, theirs[name]), name
        assert (len(mine["blocks.0.seen"]), len(theirs["blocks.0.seen"])) == (4, 5)
    assert not torch.equal(first[0]["blocks.0.mean"], first[1]["blocks.0.mean"])


def two_backwards_with_statistics() -> None:
    from ourshard import shard_model

    model = shard_model(Pair(None), ENDS["stage 0"])
    first, second = (square_loss(model, numbers(dist.get_rank(), 4)) for _ in range(2))
    first.backward(retain_graph=True)
    second.backward()
    first.backward()


def test_ranks_take_statistics_between_two_backwards_of_what_was_computed_before(ranks):
    """A batch norm saves its statistics for backward, which does not read them."""
    ranks(2)(two_backwards_with_statistics)


def test_buffers_of_a_block_that_rank_0_skips_stay_the_same_on_all_ranks(ranks):
    for mine, theirs in zip(*ranks(2)(buffers_after_training, ENDS["stage 0"], 0), strict=True):
        assert all(torch.equal(buffer, theirs[name]) for name, buffer in mine.items() if not name.endswith("seen"))


class Rotated(nn.Module):
    """A layer whose weight is turned by a buffer, which backward reads and no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turn", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.turn


def two_backwards_after_loading(config: dict[str, Any], folder: str) -> None:
    from ourshard import full_state_dict, load_full_state_dict
    from ourshard.checkpoint.running import load, save

    model = shard_model(Rotated(), config)
    save(model, None, folder)
    for again in (lambda: load(model, None, folder), lambda: load_full_state_dict(model, full_state_dict(model))):
        again()
        first, second = (square_loss(model, numbers(dist.get_rank(), 4)) for _ in range(2))
        first.backward()
        second.backward()


@pytest.mark.parametrize("config", ENDS.values(), ids=ENDS)
def test_buffers_that_were_loaded_are_no_ranks_own_update(ranks, config, tmp_path):
    """Taken for one, they were written to by other ranks at the end of the first backward, between the two."""
    ranks(2)(two_backwards_after_loading, config, str(tmp_path / "saved"))
