"""Continuous batching of transformers, in which each rank has requests of its own: D02."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.trainer_runs import adapted, enable, llama, quiet

pytestmark = pytest.mark.ranks

PROMPTS = ([[5, 6, 7], [8, 9], [10, 11, 12, 13]], [[14]])  # of each rank
LENGTHS = (2, 4)  # of what each rank wants: the ranks need different numbers of forwards


def batches(shard: dict[str, object] | None, peft: str | None, rank: int) -> list[list[int]]:
    """Return the tokens that a model generates of a rank's prompts after a step of training."""
    from accelerate import Accelerator
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    quiet()
    enable(shard)
    accelerator = Accelerator(cpu=True)
    model = adapted(llama(), peft)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    tokens = torch.arange(24).view(2, 12)
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    config = GenerationConfig(max_new_tokens=LENGTHS[rank], do_sample=False, eos_token_id=-1, pad_token_id=0)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    told = model.generate_batch(PROMPTS[rank], generation_config=config, continuous_batching_config=sizes)
    return [answer.generated_tokens for answer in told.values()]


def on_rank(shard: dict[str, object], peft: str | None) -> list[list[int]]:
    import torch.distributed as dist

    return batches(shard, peft, dist.get_rank())


@pytest.mark.parametrize("peft", [pytest.param(None, marks=pytest.mark.slow), "lora"])
def test_ranks_with_requests_of_their_own_generate_what_one_process_does(ranks, peft):
    wanted = [batches(None, peft, rank) for rank in range(2)]
    assert [len(answers) for answers in wanted] == [3, 1]
    assert ranks(2)(on_rank, {"stage": 3, "persist_below": 30}, peft) == wanted
