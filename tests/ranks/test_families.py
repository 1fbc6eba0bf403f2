"""Model families, each trained three steps on two ranks at stage 3 and in one process. D01, D03, F12 of CASES.md."""

from __future__ import annotations

import pytest

from tests.ranks.families import FAMILIES, task, words
from tests.ranks.training import assert_same, reference, train

pytestmark = pytest.mark.ranks

STAGE_3 = {"stage": 3, "persist_below": 30}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_in_one_process(ranks, name):
    wanted = reference(task(name), 2, one_by_one=True)
    assert wanted.losses[0] != wanted.losses[-1]
    assert_same(ranks(2)(train, task(name), STAGE_3), wanted, 1e-5, name)


def test_batches_of_the_multimodal_family_skip_the_vision_tower_on_no_rank_on_one_and_on_both():
    shown = [[int(part[0, 0]) % 2 == 0 for part in words(step, 4).chunk(2)] for step in range(3)]
    assert shown == [[True, True], [True, False], [False, False]]
