"""F01, F08, F09, B05: parameters that are read outside of their module, outside of forward, or only looked at."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.ranks.nets import TOKENS, VOCABULARY, WIDTH, Block, llama, token_loss, tokens, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, momentum

pytestmark = pytest.mark.ranks

CONFIGS = TOY
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


class Crossed(nn.Module):
    """Every way of F08 to use a parameter outside of the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # of the root, used in its own forward
        self.table = nn.Parameter(torch.randn(3, WIDTH))  # handed to a function
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.mapped = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})
        self.blocks = nn.ModuleList([Block(), Block()])
        self.giver = Giver()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + add_row(x, self.table)
        x = x + self.listed[0] + self.listed[1] * self.mapped["a"]
        other = self.blocks[1].up.weight
        x = x + other.data.abs().mean() + other.detach().float().square().mean()  # no gradient
        x = x + 0.1 * (other.double().mean() + other.to(x.device, torch.float64).square().mean()).float()
        x = self.blocks[0](x)
        x = F.linear(x, self.blocks[1].down.weight @ self.blocks[1].down.weight.t())  # 2-d, of a unit not yet run
        x = x + self.blocks[0].norm.bias  # 1-d: a stand-in of one element would broadcast
        x = self.blocks[1](x)
        x = F.linear(x, self.giver())  # a module that returns its parameter
        x, _ = self.attention(x[:, None], x[:, None], x[:, None])  # uses out_proj.weight without calling out_proj
        return x[:, 0]


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight


def add_row(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x @ table.t() @ table / WIDTH


def cross(config: dict[str, Any], wrap: str) -> None:
    both = pair({**config, "wrap": {"classes": [wrap]}}, Crossed, momentum)
    both.train(4)
    both.assert_same()
    assert not any(unit.whole for unit in both.engine.units if unit.sharded)


class ReadAtOtherTimes(nn.Module):
    """A weight of a unit that is never called is used before the other unit, or on the first rows after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, after: bool) -> torch.Tensor:
        weight = self.blocks[1].up.weight[:WIDTH]
        return F.linear(self.blocks[0](x), weight) if after else self.blocks[0](F.linear(x, weight))


def read_at_other_times(config: dict[str, Any]) -> None:
    both = pair({**config, "wrap": {"classes": ["Block"]}}, ReadAtOtherTimes, momentum)
    rank = dist.get_rank()
    for step in range(4):
        rows = joined(step)
        for number, mine in enumerate(rows.chunk(2)):
            (both.plain(mine, number == 0) - mine).square().mean().div(2).backward()
        (both.sharded(part(rows), rank == 0) - part(rows)).square().mean().backward()
        both.assert_same_gradients()
        both.step()
        both.zero_grad(set_to_none=step != 1)
    both.assert_same()


@EVERY
def test_gradients_that_come_before_a_units_reduction_on_one_rank_and_after_it_on_another(ranks, config):
    ranks(2)(read_at_other_times, config)


@EVERY
@pytest.mark.parametrize("wrap", ["Block", "Giver"])
def test_parameters_used_outside_of_their_module_have_their_gradients(ranks, config, wrap):
    """F08: with no registration call. A gradient that comes after the unit was reduced counts too."""
    ranks(2)(cross, config, wrap)


class Library(nn.Module):
    """Methods other than forward, as pipelines and trainers call them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.encode(ids)).flatten(0, 1), ids.flatten())


def call_methods(config: dict[str, Any]) -> None:
    both = pair(config, Library, momentum)
    ids = tokens(0, 4)
    for step in range(3):
        both.zero_grad()
        both.plain.head(both.plain.encode(ids)).square().mean().backward()
        both.sharded.head(both.sharded.encode(part(ids))).square().mean().backward()
        both.step()
        with torch.no_grad():
            torch.testing.assert_close(both.sharded.encode(ids), both.plain.encode(ids))
            torch.testing.assert_close(both.sharded.embed(ids), both.plain.embed(ids))
        both.assert_same()
        assert not any(unit.whole for unit in both.engine.units if unit.sharded), f"left whole after step {step}"
    with both.engine.no_sync():
        both.sharded(part(ids))  # its sync is read when a forward begins; `encode` must not inherit it
    both.zero_grad()
    both.plain.encode(ids).square().mean().backward()
    both.sharded.encode(part(ids)).square().mean().backward()
    both.step()
    both.assert_same()


@EVERY
def test_methods_other_than_forward_that_call_submodules_work_with_gradient(ranks, config):
    """F01 (2), (3)."""
    ranks(2)(call_methods, config)


def call_a_unit(stage: int) -> None:
    """Compare a unit's module that is called on its own, around another unit and in bf16, with a plain one."""
    import ourshard

    def make() -> nn.ModuleDict:
        torch.manual_seed(0)
        inner, outer = Block(), Block()
        outer.inner, outer.last = inner, nn.LayerNorm(WIDTH)

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = inner(outer.norm(x)) @ outer.up.weight.t()[:, :WIDTH]
            assert outer.norm.weight.dtype == outer.last.weight.dtype == torch.bfloat16  # not the masters
            return outer.last(x)

        outer.forward = forward
        return nn.ModuleDict({"outer": outer})

    wrap = {"modules": ["outer", "outer.inner"]}
    precision = {"param_dtype": "bfloat16"}
    model, plain = make(), make().to(torch.bfloat16)
    ourshard.shard_model(model, {"stage": stage, "persist_below": 20, "wrap": wrap, "precision": precision})
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model["outer"](rows), plain["outer"](rows))
        assert model["outer"].last.weight.dtype == torch.float32  # the master, once more
    for made in (model, plain):
        made["outer"](rows).pow(2).sum().backward()
    for name in ("norm", "last", "inner.norm"):
        mine, theirs = (made["outer"].get_submodule(name).weight for made in (model, plain))
        assert mine.dtype == torch.float32
        assert torch.equal(mine.grad, theirs.grad.float())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_unit_that_is_called_on_its_own_has_its_small_parameters(ranks, stage):
    ranks(2)(call_a_unit, stage)


def read_outside(config: dict[str, Any]) -> dict[str, str]:
    both = pair(config, Library)
    told = {}
    for name, read in {
        "method": lambda m: m.scaled(torch.ones(2, WIDTH)),
        "linear": lambda m: F.linear(torch.ones(2, WIDTH), m.head.weight),
        "sum": lambda m: torch.ones(WIDTH) + m.scale,
        "norm": lambda m: m.blocks[0].up.weight.norm(),
        "item": lambda m: m.scale[0].item(),
        "numpy": lambda m: m.scale.detach().numpy(),
        "iterate": lambda m: list(m.scale),
        "float": lambda m: float(m.scale.sum()),
        "equal": lambda m: m.scale == 1,
        "copied from": lambda m: torch.zeros(m.head.weight.shape).copy_(m.head.weight),
        "added from": lambda m: torch.zeros(m.head.weight.shape).add_(m.head.weight),
        "written into rows of": lambda m: torch.zeros(2, *m.head.weight.shape)[0].lerp_(m.head.weight, 0.5),
    }.items():
        try:
            read(both.sharded)
            told[name] = ""
        except RuntimeError as error:
            told[name] = str(error)
    return told


def test_a_resting_parameter_that_is_read_outside_of_a_forward_says_its_name_and_what_to_do(ranks):
    """F01 (4), (5), F08: never a placeholder that computes or broadcasts."""
    for told in ranks(2)(read_outside, {"stage": 3, "persist_below": 0}):
        for name, message in told.items():
            assert "ourshard.gathered(model)" in message, f"{name}: {message!r}"
            assert "'scale'" in message or "weight'" in message


def take_values() -> dict[str, bool]:
    """Let plain tensors take the values of a parameter inside of `gathered`."""
    import ourshard

    both = pair({"stage": 3, "persist_below": 0}, Library)
    weight, wanted = both.sharded.head.weight, both.plain.head.weight.detach()
    copied, added, held = (torch.zeros(weight.shape) for _ in range(3))
    with ourshard.gathered(both.sharded), torch.no_grad():
        copied.copy_(weight)
        added.add_(weight, alpha=2.0)
        held[:] = weight
    return {
        "copied": torch.equal(copied, wanted),
        "added": torch.equal(added, 2 * wanted),
        "held": torch.equal(held, wanted),
    }


def test_plain_tensors_take_the_values_of_a_parameter_that_is_whole(ranks):
    """F11: `copy_` from a resting parameter once wrote nothing, and said nothing."""
    for told in ranks(2)(take_values):
        assert told == {"copied": True, "added": True, "held": True}


def keep_after_block(config: dict[str, Any]) -> None:
    """Keep parameters and views of them beyond the block, read them, train on, read them again, and let go."""
    import ourshard

    both = pair(config, Library, momentum)
    ids = tokens(0, 4)
    slots = [lane.full for unit in both.engine.units for lane in unit.freed]
    with ourshard.gathered(both.sharded):
        kept = both.sharded.head.weight
        views = {"detached": kept.detach(), "row": kept.detach()[1], **both.sharded.state_dict()}
        wanted = {name: value.clone() for name, value in views.items()}
    assert not any(slot.allocated for slot in slots)
    assert kept.shape == both.plain.head.weight.shape
    assert "head.weight" in repr(kept)
    for _ in range(2):
        for read in (torch.sum, torch.Tensor.tolist, torch.Tensor.detach, lambda p: p.data, lambda p: p[0]):
            with pytest.raises(RuntimeError, match=r"'head\.weight' was taken inside of `with ourshard.gathered"):
                read(kept)
        for name, value in views.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
        both.zero_grad()
        both.plain(ids).backward()
        both.sharded(part(ids)).backward()
        both.step()
        both.assert_same()
        assert not any(slot.allocated for slot in slots)
    del kept, views, value
    gc.collect()  # of the errors
    with torch.no_grad():
        both.sharded(part(ids))
    assert not any(unit.taken for unit in both.engine.units)


def test_what_is_kept_of_a_gathered_model_is_an_error_or_stays_as_it_was(ranks):
    """X07: use after release. Reading it once ended the process."""
    ranks(2)(keep_after_block, {"stage": 3, "persist_below": 0})


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((p.pow(2).mean() for p in model.parameters()), torch.zeros(()))


def backward_after_block(config: dict[str, Any]) -> None:
    import ourshard

    both = pair({**config, "wrap": {"classes": ["Block"]}}, Library, momentum)
    ids = tokens(0, 4)
    for number in range(4):
        both.zero_grad()
        losses = [penalty(both.plain)]
        with ourshard.gathered(both.sharded):
            losses.append(penalty(both.sharded))
        if number % 2:  # in another graph, or in the same
            for loss in losses:
                loss.backward()
            losses = [torch.zeros(())] * 2
        (losses[0] + both.plain(ids)).backward()
        (losses[1] + both.sharded(part(ids))).backward()
        both.step()
        both.assert_same()
    del loss, losses
    both.sharded(part(ids))
    assert not any(lane.left for lane in both.engine.lanes())


@EVERY
def test_a_backward_reads_what_was_computed_with_whole_parameters_before_the_block_ended(ranks, config):
    """X07: `pow` saves the parameter itself, whose memory went with the block: the process died."""
    ranks(2)(backward_after_block, config)


def read_root_before_backward() -> None:
    """F01 (4) and F09: fused losses read `lm_head.weight` after the forward; the root is whole until backward ends."""
    both = pair({"stage": 3, "persist_below": 0}, Library, momentum)
    ids = tokens(0, 4)
    for _ in range(3):
        both.zero_grad()
        for model, mine in ((both.plain, ids), (both.sharded, part(ids))):
            loss = model(mine)
            assert type(model.head.weight) is nn.Parameter
            (loss + F.linear(torch.ones(1, WIDTH), model.head.weight).square().mean()).backward()
        both.step()
    both.assert_same()


def test_the_roots_weights_are_plain_parameters_from_forward_to_the_end_of_backward(ranks):
    ranks(2)(read_root_before_backward)


def generate(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    both = pair(config, llama)
    both.train(1, loss=lambda m, rows: token_loss(m, tokens(0, len(rows))))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = tokens(1, 1)
    return both.plain.generate(ids, **options).tolist(), both.sharded.generate(ids, **options).tolist()


def test_generate_gives_the_tokens_of_one_process(ranks):
    """F01 (1)."""
    for config in (CONFIGS["stage 2"], CONFIGS["stage 3"]):
        for plain, sharded in ranks(2)(generate, config):
            assert plain == sharded
            assert len(plain[0]) > TOKENS


def look(config: dict[str, Any]) -> dict[str, Any]:
    from ourshard import engine_of, shard_model

    model = shard_model(toy(), {**config, "ledger": True})
    ledger = engine_of(model).ledger  # type: ignore[union-attr]
    ledger.reset()
    weight = model.blocks[1].up.weight
    seen = {
        "shape": tuple(weight.shape),
        "size": weight.size(0),
        "numel": weight.numel(),
        "dim": weight.dim(),
        "len": len(weight),
        "dtype": str(weight.dtype),
        "stride": weight.stride(),
        "contiguous": weight.is_contiguous(),
        "floating": weight.is_floating_point(),
        "leaf": weight.is_leaf,
        "parameter": isinstance(weight, nn.Parameter),
        "nbytes": weight.nbytes,
        "repr": repr(weight),
        "format": f"{weight}",
        "count": sum(p.numel() for p in model.parameters()),
        "meta": tuple(torch.empty_like(weight, device="meta").shape),
        "zeros": tuple(torch.zeros_like(weight).shape),
        "print": str(model),
        "features": model.blocks[1].up.in_features,
    }
    seen["collectives"] = sum(ledger.calls.values())
    return seen


def test_looking_at_a_resting_parameter_shows_the_whole_one_and_moves_nothing(ranks):
    """B05, B09, F09: shape, numel and repr are those of the whole parameter, at no communication."""
    wanted = toy().blocks[1].up.weight
    for seen in ranks(2)(look, {"stage": 3, "persist_below": 0}):
        assert seen["shape"] == seen["meta"] == seen["zeros"] == tuple(wanted.shape)
        assert (seen["size"], seen["len"], seen["dim"]) == (wanted.size(0), len(wanted), 2)
        assert seen["numel"] == wanted.numel()
        assert seen["nbytes"] == wanted.nbytes
        assert seen["stride"] == wanted.stride()
        assert seen["contiguous"]
        assert seen["floating"]
        assert seen["leaf"]
        assert seen["parameter"]
        assert seen["dtype"] == "torch.float32"
        assert seen["count"] == sum(p.numel() for p in toy().parameters())
        assert "blocks.1.up.weight" in seen["repr"]
        assert str(tuple(wanted.shape)) in seen["format"]
        assert seen["features"] == WIDTH
        assert seen["print"] == str(toy())
        assert seen["collectives"] == 0


def own_loss_in_forward() -> None:
    class Fused(Library):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(F.linear(self.encode(ids), self.head.weight).flatten(0, 1), ids.flatten())

    both = pair({"stage": 3, "persist_below": 0}, Fused, momentum)
    for _ in range(3):
        both.zero_grad()
        both.plain(tokens(0, 4)).backward()
        both.sharded(part(tokens(0, 4))).backward()
        both.step()
    both.assert_same()


def test_a_fused_loss_in_the_top_module_sees_plain_weights(ranks):
    """F09."""
    ranks(2)(own_loss_in_forward)


def pickled(stage: int) -> list[str]:
    import ourshard

    model = ourshard.shard_model(llama(), {"stage": stage})
    said = []
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError) as caught:
            attempt(model)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_cannot_be_pickled_or_copied_says_what_to_do(ranks, stage):
    for pickling, copying in ranks(2)(pickled, stage):
        assert "can't be pickled; save it with accelerator.save_model" in pickling
        assert "copy it before `prepare`" in copying
