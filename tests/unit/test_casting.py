"""What goes into a model, and comes out of it, in another dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from ourshard.runtime.casting import cast
from torch import nn


class Pair(NamedTuple):
    values: torch.Tensor
    ids: torch.Tensor


def test_floating_tensors_are_cast_in_containers_that_stay_what_they_are() -> None:
    values, ids = torch.ones(2), torch.arange(2)
    found = cast(({"deep": [Pair(values, ids)]}, "a word", None), torch.bfloat16)
    assert type(found) is tuple
    (pair,) = found[0]["deep"]
    assert type(pair) is Pair
    assert pair.values.dtype == torch.bfloat16
    assert pair.ids is ids
    assert found[1:] == ("a word", None)


def test_what_has_nothing_to_cast_is_returned_itself() -> None:
    """A forward may add to the list that it was given."""
    for value in ([torch.arange(2)], {"ids": torch.arange(2)}):
        assert cast(value, torch.bfloat16) is value


def test_a_parameter_that_is_an_input_is_cast_and_gets_its_gradient() -> None:
    """A prompt that is trained, say."""
    prompt = nn.Parameter(torch.ones(2))
    given = cast(prompt, torch.bfloat16)
    assert given.dtype == torch.bfloat16
    given.sum().backward()
    assert torch.equal(prompt.grad, torch.ones(2))
