"""Plain data through JSON and back, exactly."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ourshard.checkpoint import plain
from ourshard.checkpoint.source import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.booleans() | st.just("$") | st.tuples(st.integers(), st.text())
DATA = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def through_json(value: Any) -> Any:
    return plain.decode(json.loads(json.dumps(plain.encode(value))))


@given(DATA)
def test_any_plain_data_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert repr(found) == repr(value)


def test_random_states_come_back_so_that_they_can_be_set() -> None:
    import random

    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(),
        "python": random.getstate(),
    }
    found = through_json(state)
    torch.set_rng_state(found["torch"])
    numpy.random.set_state(found["numpy"])
    random.setstate(found["python"])
    assert torch.equal(torch.get_rng_state(), state["torch"])
    assert random.getstate() == state["python"]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor(7), torch.tensor(True),
        torch.arange(6).reshape(2, 3).T, torch.nn.Parameter(torch.ones(2)),
    ],
)  # fmt: skip
def test_tensors_keep_dtype_shape_and_bits(value: torch.Tensor) -> None:
    found = through_json({"t": value})["t"]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    one, other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, value))
    assert torch.equal(one, other)


def test_numbers_that_json_lacks_come_back() -> None:
    assert math.isnan(through_json(float("nan")))
    assert through_json([float("inf"), -float("inf")]) == [float("inf"), -float("inf")]
    assert math.copysign(1, through_json(-0.0)) == -1
    assert through_json(numpy.float32(0.1)) == numpy.float32(0.1)
    assert through_json({1, 2}) == {1, 2}
    assert through_json(complex(-0.0, 0.1)) == complex(-0.0, 0.1)
    assert through_json(torch.bfloat16) is torch.bfloat16


def test_subclasses_of_plain_types_become_plain() -> None:
    class Color(enum.IntEnum):
        RED = 1

    assert through_json({"a": OrderedDict(b=1), "c": defaultdict(list, d=[2])}) == {"a": {"b": 1}, "c": {"d": [2]}}
    assert type(through_json(Color.RED)) is int
    assert type(through_json(torch.Size([1, 2]))) is tuple


class Custom:
    """Something that only pickle could save."""


@pytest.mark.parametrize(
    "value",
    [Custom(), len, lambda: 1, torch.nn.Linear(1, 1), numpy.array([object()]), range(3), torch.eye(2).to_sparse()],
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^scheduler\.steps\[1\]\['k'\]"):
        plain.encode({"steps": [0, {1: 2, "k": value}]}, "scheduler")


DAMAGED: list[Any] = [
    {"$": "pickle"},
    {"$": ["tuple"]},
    {"$": None},
    {"$": "tuple"},
    {"$": "tuple", "value": 3},
    {"$": "float", "value": "x"},
    {"$": "dict", "value": [[1]]},
    {"$": "dict", "value": [[[1], 2]]},
    {"$": "set", "value": [[1]]},
    {"$": "bytes", "value": "*"},
    {"$": "tensor", "dtype": "F32", "shape": [2], "value": ""},
    {"$": "tensor", "dtype": "F99", "shape": [], "value": ""},
    {"$": "tensor", "dtype": "F32", "shape": [-1, -1], "value": "AAAAAA=="},
    {"$": "dtype", "value": "load"},
    {"$": "array", "dtype": "O", "shape": [], "value": ""},
    {"$": "array", "dtype": "nope", "shape": [], "value": ""},
]


@pytest.mark.parametrize("value", DAMAGED)
def test_damaged_data_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError):
        plain.decode([{"a": value}])
