"""Lazy tensors against ordinary ones: the same values, and no memory where none is needed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.runtime.lazy import LazyTensor, lazy, materialize, source_of
from ourshard.runtime.lazy_init import init_context
from ourshard.runtime.source import Constant, FileSource, TensorSource, bytes_read
from torch import nn
from torch.nn import functional as F

T = torch.Tensor


def numbers(*shape: int) -> T:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def in_file(folder: Path, value: T, begin: int = 24) -> LazyTensor:
    """Return a lazy tensor over a file that holds `value` from byte `begin` on."""
    path = folder / "values"
    path.write_bytes(b"\0" * begin + value.numpy().tobytes())
    return lazy(FileSource(path, begin, value.shape, value.dtype))


STAY_LAZY: dict[str, Callable[[T], T]] = {
    "transpose": lambda t: t.transpose(0, 1),
    "row": lambda t: t[2],
    "rows": lambda t: t[1:3],
    "columns": lambda t: t[:, 1:3],
    "everything": lambda t: t[...],
    "last": lambda t: t[..., 0],
    "view": lambda t: t.view(24, 5),
    "part of a view": lambda t: t.reshape(6, 20)[3:].contiguous(),
    "chunk": lambda t: t.chunk(2, 1)[1],
    "split": lambda t: torch.split(t, [1, 3], 1)[1],
    "unbind": lambda t: t.unbind(0)[2],
    "cat": lambda t: torch.cat([t, t[:, :2]], 1),
    "stack": lambda t: torch.stack([t, t], -1),
    "cast": lambda t: t.to(torch.bfloat16),
    "cast of a cut": lambda t: t[1:4].double(),
    "permute": lambda t: t.permute(2, 0, 1).contiguous(),
    "clone": lambda t: t.clone(),
}


@pytest.mark.parametrize("name", STAY_LAZY)
def test_cuts_joins_and_casts_stay_lazy_and_any_run_of_their_elements_can_be_read(name: str, tmp_path: Path):
    value = numbers(6, 4, 5)
    made, wanted = STAY_LAZY[name](in_file(tmp_path, value)), STAY_LAZY[name](value)
    assert isinstance(made, LazyTensor)
    assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    for start, stop in ((0, wanted.numel()), (3, wanted.numel() - 2), (5, 5)):
        assert torch.equal(made.source.read(start, stop), wanted.reshape(-1)[start:stop])


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_any_run_of_a_join_of_cuts_is_that_of_the_tensor(a: int, b: int, c: int, data: st.DataObject):
    value = numbers(a, b, c)
    dim = data.draw(st.integers(-3, 2))
    start = data.draw(st.integers(0, value.shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, value.shape[dim]))

    def made(t: T) -> T:
        return torch.cat([t, t.narrow(dim, start, stop - start), t], dim)

    wanted = made(value).reshape(-1)
    first = data.draw(st.integers(0, len(wanted)))
    last = data.draw(st.integers(first, len(wanted)))
    assert torch.equal(made(lazy(TensorSource(value))).source.read(first, last), wanted[first:last])


def test_reading_rows_reads_their_bytes_and_no_others(tmp_path: Path):
    tensor = in_file(tmp_path, numbers(100, 10))
    before = bytes_read()
    tensor[20:30].to(torch.bfloat16).source.whole()
    assert bytes_read() - before == 10 * 10 * 4


def test_questions_are_answered_as_for_a_tensor_on_the_cpu(tmp_path: Path):
    parameter = nn.Parameter(in_file(tmp_path, numbers(3, 4)))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.grad is None
    assert (parameter.device.type, parameter.is_cpu, parameter.is_meta) == ("cpu", True, False)
    assert (parameter.numel(), parameter.element_size(), len(parameter)) == (12, 4, 3)
    assert source_of(parameter) is not None


def test_what_only_reads_leaves_a_tensor_lazy(tmp_path: Path):
    value = numbers(6, 4)
    tensor = in_file(tmp_path, value)
    assert torch.equal(tensor + 1, value + 1)
    assert torch.equal(torch.linalg.norm(tensor[:2]), torch.linalg.norm(value[:2]))
    other = torch.zeros(6, 4)
    other[2:4] = tensor[2:4]
    assert torch.equal(other[2:4], value[2:4])
    assert source_of(tensor) is not None


def test_often_read_tensors_stay_in_memory(tmp_path: Path):
    tensor = in_file(tmp_path, numbers(6, 4))
    for _ in range(5):
        tensor.sum()
    assert source_of(tensor) is None
    assert type(tensor) is torch.Tensor


def test_a_change_of_a_view_reaches_all_that_share_the_memory(tmp_path: Path):
    value = numbers(6, 4)
    parameter = nn.Parameter(in_file(tmp_path, value))
    data = parameter.data
    data[2].add_(torch.ones(4))
    value[2] += 1
    assert torch.equal(parameter.detach(), value)
    assert torch.equal(data, value)
    assert type(parameter) is nn.Parameter


def test_a_forward_with_gradient_makes_the_parameter_an_ordinary_one_and_keeps_its_identity(tmp_path: Path):
    layer = nn.Linear(4, 6)
    layer.weight = parameter = nn.Parameter(in_file(tmp_path, numbers(6, 4)))
    F.linear(torch.ones(2, 4), layer.weight).sum().backward()
    assert layer.weight is parameter
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter.grad, torch.full((6, 4), 2.0))


def test_modules_cast_copy_and_pickle_as_always(tmp_path: Path):
    value = numbers(6, 4)
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(in_file(tmp_path, value))
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, LazyTensor)
    twin.to(torch.float64)
    assert isinstance(twin.weight, LazyTensor)
    assert torch.equal(materialize(twin.weight), value.double())
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight, value)


def test_load_state_dict_takes_lazy_values_without_reading_them(tmp_path: Path):
    value = numbers(6, 4)
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(lazy(Constant(0, (6, 4), torch.float32)))
    before = bytes_read()
    layer.load_state_dict({"weight": in_file(tmp_path, value), "bias": torch.ones(6)})
    assert bytes_read() == before
    assert isinstance(layer.weight, LazyTensor)
    assert torch.equal(layer.weight.source.whole(), value)


def test_values_that_torch_moves_without_a_word_are_refused_not_made_up(tmp_path: Path):
    ordinary = nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        ordinary.data = in_file(tmp_path, numbers(6, 4))


# ---- initialisation ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Initialises in ways that are easy to get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 30, padding_idx=3)
        self.first = nn.Linear(40, 30)
        self.second = nn.Linear(30, 40, dtype=torch.float64)
        self.token = nn.Parameter(torch.randn(40, 30))
        self.scale = nn.Parameter(torch.ones(2000))
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        nn.init.orthogonal_(self.second.weight)
        with torch.no_grad():
            self.token.mul_(0.5).clamp_(-1, 1)
            self.embedding.weight[5].uniform_()
            self.first.weight[:, 1].fill_(self.first.weight[0, 0])
        self.register_buffer("mask", torch.ones(40, 40).tril())
        self.register_buffer("bits", torch.ones((40, 40), dtype=bool).tril())  # type: ignore[call-overload]
        self.register_buffer("line", torch.ones(torch.tensor(1600)).cumsum(0))  # type: ignore[call-overload]
        self.register_buffer("cache", torch.zeros(40, 40), persistent=False)


def test_a_model_made_in_the_init_context_has_the_values_that_it_has_without():
    torch.manual_seed(5)
    wanted, after = Odd(), torch.rand(2)
    torch.manual_seed(5)
    with init_context():
        made = Odd()
    assert torch.equal(torch.rand(2), after)
    for (name, value), parameter in zip(wanted.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(materialize(parameter), value), name
    for value, buffer in zip(wanted.buffers(), made.buffers(), strict=True):
        assert type(buffer) is torch.Tensor
        assert torch.equal(buffer, value)


def test_the_init_context_makes_large_parameters_lazy():
    with init_context():
        made = nn.Sequential(nn.Linear(40, 30), nn.Embedding(100, 20), nn.LayerNorm(10))
    assert [isinstance(p, LazyTensor) for p in made.parameters()] == [True, False, True, False, False]
