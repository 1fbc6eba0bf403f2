"""I16, `offload.activations: cpu`: inputs of recomputed units wait on the host, and no gradient changes by a bit."""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ourshard.config import ShardConfig
from ourshard.runtime import host_pool
from ourshard.runtime.api import engine_of, shard_model
from ourshard.runtime.host import HostMemory
from ourshard.runtime.host_pool import HostPool
from ourshard.runtime.inputs import LEAST_NBYTES
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 128, 4
ROWS = LEAST_NBYTES // (4 * WIDTH)  # of an input that just moves


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.given: list[weakref.ref[Any]] = []  # memory of inputs

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            self.given.append(weakref.ref(x.untyped_storage()))
        return self.body(x)


class Keyword(Block):
    """Gets what moves by keyword, and what all blocks share within tuples."""

    def forward(self, *, h: torch.Tensor, shared: Any) -> torch.Tensor:  # type: ignore[override]
        scale, (states,) = shared
        return self.body(h) * scale + states


class Transposed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.t() if len(x) == WIDTH else x).t()


class Nested(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + checkpoint(self.body, x * 2, use_reentrant=False)


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.body(x)


class SmallInPlace(InPlace):
    """Changes in place what is too small to move."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:8].clone()) if len(x) > 8 else super().forward(x)


class Failing(Block):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise KeyError("the third block")
        return y


class Stack(nn.Module):
    def __init__(self, kind: type[Block], around: bool) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(BLOCKS))
        self.around = around  # a checkpoint of the model's own is around each block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        shared = x.detach() * 0.5, (x * 0.1,)
        for block in self.blocks:
            if isinstance(block, Keyword):
                x = block(h=x, shared=shared)
            else:
                x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return x


def build(tier: str, kind: type[Block] = Block, around: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"persist_below": 0, "wrap": {"classes": [kind.__name__]}, "ledger": True, **options}
    options |= {"activation_checkpointing": True, "offload": {"activations": tier}}
    model = shard_model(Stack(kind, around), options)
    torch.manual_seed(torch.distributed.get_rank())  # of dropout
    return model


def rows(number: int = ROWS, seed: int = 0) -> torch.Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(10 * seed + torch.distributed.get_rank()))


def loss_of(model: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = model(rows() if x is None else x).pow(2).mean()
    return loss


def gradients(model: Any) -> list[torch.Tensor]:
    """Return this rank's rows of all gradients."""
    return [getattr(p.grad, "local", p.grad).clone() for p in model.parameters()]


# ---- what a step counts ------------------------------------------------------------------------------------


def accumulate(tier: str, stage: int) -> Any:
    """Train two micro-batches; return gradients, the ledger's figures of a forward and of the step, and what lives."""
    model = build(tier, stage=stage)
    engine = engine_of(model)
    assert engine is not None
    with engine.no_sync():
        loss_of(model).backward()
    engine.ledger.reset()
    for block in model.blocks:
        block.given.clear()
    loss = loss_of(model, rows(seed=1))
    alive = [given() is not None for block in model.blocks for given in block.given]
    forward = engine.ledger.held["input"], engine.ledger.held["inputs"]
    loss.backward()
    backward = engine.ledger.held["input"], engine.ledger.held["inputs"], engine.ledger.peak["input"]
    return gradients(model), alive, forward, backward, dict(engine.ledger.copied)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inputs_leave_the_device_and_gradients_stay_the_same(ranks: Callable[..., Any], stage: int) -> None:
    one = LEAST_NBYTES
    for plain, moved in zip(ranks(2)(accumulate, "none", stage), ranks(2)(accumulate, "cpu", stage), strict=True):
        assert all(map(torch.equal, plain[0], moved[0]))
        assert plain[1] == [True] * BLOCKS
        assert moved[1] == [False] * (BLOCKS - 1) + [True]  # the last one, which backward needs first
        assert moved[2] == (one, BLOCKS * one)
        assert moved[3] == (0, BLOCKS * one, one)  # buffers stay, and served both micro-batches
        assert moved[4] == {"to host": BLOCKS * one, "from host": (BLOCKS - 1) * one}
        assert (plain[2], plain[3], plain[4]) == ((0, 0), (0, 0, 0), {})


# ---- ways to use it ----------------------------------------------------------------------------------------


def backward_in_another_order(model: Any) -> None:
    first, second, third = (loss_of(model, rows(seed=seed)) for seed in range(3))
    first.backward()
    third.backward()
    second.backward()


def backward_twice(model: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def backward_of_a_part(model: Any) -> None:
    inner: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(lambda _, __, output: inner.append(output))
    loss = loss_of(model)
    inner[0].pow(2).mean().backward(retain_graph=True)
    loss.backward()


def second_derivatives(model: Any) -> None:
    x = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    (1e6 * gradient.pow(2).sum()).backward()


def autocast(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, rows(2 * ROWS))
    loss.backward()


def forwards_that_raise_or_are_dropped(model: Any) -> None:
    model.blocks[2].fails = True
    with pytest.raises(KeyError, match="third"):
        model(rows())
    model.blocks[2].fails = False
    for _ in range(2):
        model(rows())
    loss_of(model).backward()


def once(model: Any) -> None:
    loss_of(model).backward()


WAYS: dict[str, tuple[Callable[[Any], None], type[Block], int, int, int]] = {
    # what is done, with which blocks; inputs to the host, from it, and buffers at the end
    "another order": (backward_in_another_order, Block, 12, 11, 12),
    "twice": (backward_twice, Block, 4, 3 + 4, 4),
    "a part": (backward_of_a_part, Block, 4, 2 + 3, 4),
    "second derivatives": (second_derivatives, Block, 4, 3 + 4, 4),
    "autocast": (autocast, Block, 4, 3, 4),  # twice as many elements of half as many bytes
    "failures": (forwards_that_raise_or_are_dropped, Failing, 3 + 12, 3, 4),
    "shared, by keyword": (once, Keyword, 6, 5, 6),
    "transposed": (once, Transposed, 4, 3, 4),
    "nested": (once, Nested, 4, 3, 4),
}


def use(tier: str, way: str) -> Any:
    run, kind, *_ = WAYS[way]
    model = build(tier, kind)
    run(model)
    engine = engine_of(model)
    assert engine is not None
    held = engine.ledger.held
    return gradients(model), held["input"], held["inputs"], dict(engine.ledger.copied)


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_gradients_stay_the_same_however_it_is_used(ranks: Callable[..., Any], way: str) -> None:
    down, up, buffers = (LEAST_NBYTES * number for number in WAYS[way][2:])
    for plain, moved in zip(ranks(2)(use, "none", way), ranks(2)(use, "cpu", way), strict=True):
        assert all(map(torch.equal, plain[0], moved[0]))
        assert moved[1:] == (0, buffers, {"to host": down, "from host": up})


class LateMover:
    """Makes each copy as late as a stream may: when compute waits for it, or for one behind it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []  # of copies that have not run
        self.begun = 0  # copies that were ever queued

    def _later(self, copy: Callable[[], None]) -> int:
        self.queue.append(copy)
        self.begun += 1
        return self.begun

    def down(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        stored, source = torch.full_like(tensor, torch.nan), weakref.ref(tensor)
        dropped = weakref.ref(stored)

        def copy() -> None:
            source_now, stored_now = source(), dropped()
            if stored_now is not None:  # else nobody will read it
                assert source_now is not None, "the tensor was let go while the copy read it"
                stored_now.copy_(source_now)

        return stored, self._later(copy)

    def up(self, stored: torch.Tensor, like: Any) -> tuple[torch.Tensor, int]:
        tensor = like.empty(like.device).fill_(torch.nan)
        there = weakref.ref(tensor)

        def copy() -> None:
            assert there() is not None, "the tensor was let go while the copy filled it"
            tensor_now = there()
            assert tensor_now is not None
            tensor_now.copy_(stored)

        return tensor, self._later(copy)

    def wait(self, event: int) -> None:
        while self.queue and self.begun - len(self.queue) < event:
            self.queue.pop(0)()

    def drop(self, stored: torch.Tensor) -> None:
        """Let go of it."""

    def hold(self, nbytes: int) -> None:
        """Count nothing."""


def use_late(way: str) -> list[torch.Tensor]:
    run, kind, *_ = WAYS[way]
    model = build("cpu", kind)
    engine = engine_of(model)
    assert engine is not None
    engine.inputs._mover = LateMover()
    run(model)
    assert engine.inputs._mover.begun > BLOCKS
    return gradients(model)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["another order", "twice", "a part", "failures", "shared, by keyword"])
def test_each_copy_is_waited_for_before_its_bytes_are_used_or_let_go(ranks: Callable[..., Any], way: str) -> None:
    for plain, moved in zip(ranks(2)(use, "none", way), ranks(2)(use_late, way), strict=True):
        assert all(map(torch.equal, plain[0], moved))


def change_in_place(tier: str, kind: type[Block]) -> str:
    with pytest.raises(RuntimeError, match=r"in ?place") as error:
        loss_of(build(tier, kind)).backward()
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [InPlace, SmallInPlace])
def test_an_input_that_its_unit_changes_in_place_is_an_error_as_it_is_without(
    ranks: Callable[..., Any], kind: type[Block]
) -> None:
    assert "modified by an inplace operation" in ranks(2)(change_in_place, "none", kind)[0]
    assert "was changed in place after the unit was given it" in ranks(2)(change_in_place, "cpu", kind)[0]


def evaluate_and_lengthen() -> Any:
    """Return what evaluations copied, and the host's bytes after each of some batches."""
    model = build("cpu")
    engine = engine_of(model)
    assert engine is not None
    with torch.no_grad():
        model(rows())
    with torch.inference_mode():
        model(rows())
    copied, held = dict(engine.ledger.copied), []
    for number in (1, 2, 1, 3, 2):
        loss_of(model, rows(number * ROWS)).backward()
        held.append(engine.ledger.held["inputs"] // LEAST_NBYTES)
    return copied, held


@pytest.mark.ranks
def test_evaluations_copy_nothing_and_buffers_grow_with_the_longest_batch_alone(ranks: Callable[..., Any]) -> None:
    assert ranks(2)(evaluate_and_lengthen) == [({}, [4, 8, 8, 12, 12])] * 2


def inside_of_another_checkpoint(tier: str) -> Any:
    """Train two steps; return gradients, the bytes that were copied, and what the log says."""
    model, told = build(tier, around=True), io.StringIO()
    handler = logging.StreamHandler(told)
    logging.getLogger("ourshard").addHandler(handler)
    for _ in range(2):
        loss_of(model).backward()
    logging.getLogger("ourshard").removeHandler(handler)
    engine = engine_of(model)
    assert engine is not None
    return gradients(model), dict(engine.ledger.copied), told.getvalue().count("a checkpoint around it")


@pytest.mark.ranks
def test_inputs_stay_where_a_checkpoint_of_the_model_itself_is_around_the_units(
    ranks: Callable[..., Any],
) -> None:
    pairs = zip(*(ranks(2)(inside_of_another_checkpoint, tier) for tier in ("none", "cpu")), strict=True)
    for plain, moved in pairs:
        assert all(map(torch.equal, plain[0], moved[0]))
        assert (moved[1], plain[2], moved[2]) == ({}, 0, 1)  # and says so, once


# ---- Transformers ------------------------------------------------------------------------------------------


def llama(tier: str, reentrant: bool | None) -> Any:
    """Train a step; `reentrant`: the user told the model to recompute again, after it was sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=3, **sizes))
    model.train()
    options = {"activation_checkpointing": True, "offload": {"activations": tier}, "ledger": True}
    model = shard_model(model, options)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ids = torch.arange(ROWS).remainder(16).view(16, -1)
    model(input_ids=ids, labels=ids).loss.backward()
    engine = engine_of(model)
    assert engine is not None
    return gradients(model), dict(engine.ledger.copied)


@pytest.mark.ranks
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_the_checkpoints_of_a_transformers_model_keep_inputs_on_the_host(
    ranks: Callable[..., Any], reentrant: bool | None
) -> None:
    for plain, moved in zip(ranks(2)(llama, "none", reentrant), ranks(2)(llama, "cpu", reentrant), strict=True):
        assert all(map(torch.equal, plain[0], moved[0]))
        assert moved[1] == {"to host": 3 * LEAST_NBYTES, "from host": 2 * LEAST_NBYTES}


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "without activation_checkpointing: true ourshard recomputes none"),
        ({"activation_checkpointing": True, "offload": {"activations": "nvme"}}, "offload.activations: nvme"),
        ({"activation_checkpointing": True, "cuda_graph": True}, "can't be combined with offload.activations"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardConfig.from_dict({"offload": {"activations": "cpu"}, **options})


def test_a_host_without_room_is_an_error_before_the_kernel_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(HostMemory(torch.device("cpu"), pin=False), lambda: None, None)
    pool.give_back(pool.take(2**20))
    monkeypatch.setattr(host_pool, "free_memory", lambda: 2**20)
    assert pool.take(2**19).nbytes == 2**20
    with pytest.raises(MemoryError, match=r"no room for another 2\.0 MiB .*1\.0 MiB are free.* have 1\.0 MiB"):
        pool.take(2**21)
