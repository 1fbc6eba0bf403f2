"""What loops call on an Accelerator besides training, on two ranks against one process on the joined batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration

from tests.integrations.client_runs import apart, world
from tests.integrations.trainer_runs import VOCAB, Tokens, enable, llama, quiet

pytestmark = pytest.mark.ranks

LOADING: dict[str, dict[str, bool]] = {
    "shards": {},
    "split": {"split_batches": True},
    "dispatch": {"dispatch_batches": True, "split_batches": True},
}


def loop(how: str, shard: dict[str, Any] | None) -> dict[str, Any]:
    """Skip a batch, train on two with values clipped, evaluate 11 rows, and hand everything back."""
    from accelerate import Accelerator

    quiet()
    enable(shard)
    options = LOADING[how]
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = 4 if options else 4 // world()
    train = torch.utils.data.DataLoader(Tokens(12), batch_size=rows)
    held = torch.utils.data.DataLoader(Tokens(11, seed=1), batch_size=rows)
    model, optimizer, train, held = accelerator.prepare(model, optimizer, train, held)
    losses = []
    for batch in accelerator.skip_first_batches(train, 1):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), batch["input_ids"].view(-1))
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    told = []
    with torch.no_grad():
        for batch in held:
            told.append(accelerator.gather_for_metrics(model(input_ids=batch["input_ids"]).logits))
    state = accelerator.get_state_dict(model)
    assert accelerator.unwrap_model(model) is model
    if accelerator.process_index == world() - 1:  # one rank alone
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    accelerator.free_memory(model, optimizer)
    return {"losses": torch.stack(losses), "told": torch.cat(told), "state": state}


def loops(shard: dict[str, Any] | None) -> dict[str, Any]:
    return {how: loop(how, shard) for how in LOADING}


def test_helpers_of_an_accelerator_give_what_they_give_in_one_process(ranks):
    wanted = loops(None)
    assert len(wanted["shards"]["told"]) == 11
    for found in ranks(2)(loops, {"persist_below": 50, "stage": 3}):
        assert apart(found, wanted) < 1e-5


def mean_seen(broadcast_buffers: bool) -> float:
    """Train on a batch that differs by rank; return the mean that a batch norm remembers of it."""
    import torch.distributed as dist
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from ourshard import ShardPlugin

    handler = DistributedDataParallelKwargs(broadcast_buffers=broadcast_buffers)
    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 2}), kwargs_handlers=[handler])
    norm = torch.nn.BatchNorm1d(3)
    model = accelerator.prepare(torch.nn.Sequential(norm, torch.nn.Linear(3, 3)))
    accelerator.backward(model(torch.full((4, 3), 10.0 * (1 + dist.get_rank()))).sum())
    return norm.running_mean.mean().item()


def test_buffers_are_each_ranks_own_where_ddp_is_told_not_to_broadcast_them(ranks):
    assert ranks(2)(mean_seen, True) == pytest.approx([1.0, 1.0])
    assert ranks(2)(mean_seen, False) == pytest.approx([1.0, 2.0])


class Asking(torch.nn.Module):
    """A module with queries of its own, which its `generate` reads beside a layer, as that of BLIP-2 does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = torch.nn.Parameter(torch.randn(40, 40))
        self.layer = torch.nn.Linear(40, 40)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) + self.queries.sum(0)

    @torch.no_grad()
    def generate(self, rows: torch.Tensor) -> torch.Tensor:
        return self(self.layer(self.queries.expand(40, 40))) + rows


def generate(shard: dict[str, Any] | None) -> list[float]:
    from accelerate import Accelerator

    quiet()
    enable(shard)
    model = Accelerator(cpu=True).prepare(Asking())
    model(torch.ones(2, 40)).sum().backward()
    found: list[float] = getattr(model, "module", model).generate(torch.ones(40)).flatten().tolist()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_generate_of_a_model_may_read_parameters_that_it_has_itself(ranks, stage):
    found = ranks(2)(generate, {"stage": stage, "persist_below": 0})
    assert found[0] == found[1] == pytest.approx(ranks(2)(generate, None)[0])


def parts_ranks(enabled: bool) -> str:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    quiet()
    enable({"stage": 3})
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(40, 40))
    try:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=enabled) as local:
            local.step()
    except ValueError as error:
        return str(error)
    return "fine"


def test_local_sgd_is_refused_where_each_rank_steps_its_own_rows(ranks):
    assert all("Pass enabled=False" in told for told in ranks(2)(parts_ranks, True))
    assert ranks(2)(parts_ranks, False) == ["fine", "fine"]
