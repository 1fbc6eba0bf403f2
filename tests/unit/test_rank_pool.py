"""The pool of ranks itself: what it returns, how it reports failures, and that it recovers."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.commands import run_cli
from tests.rank_pool import PoolSet, RankError, RankTimeout

pytestmark = pytest.mark.ranks


def _sum_of_ranks(offset: int, *, scale: int = 1) -> torch.Tensor:
    tensor = torch.full((2,), float(dist.get_rank() + offset))
    dist.all_reduce(tensor)
    return tensor.mul_(scale)[:1]


def _environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names}


def _where_ourshard_is() -> str | None:
    import ourshard

    return ourshard.__file__


def _pid() -> int:
    return os.getpid()


def _rank_one_first() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        raise KeyError("second")
    raise ValueError("the cause")


def _rank_one_alone_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def _rank_one_fails_before_a_collective() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1), async_op=True)


def _wait_where_it_can_be_seen() -> None:
    time.sleep(600)


def _die() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def _end_each_in_its_way() -> str:
    print(f"rank {dist.get_rank()} speaks", file=sys.stderr)
    if dist.get_rank() == 1:
        raise SystemExit(7)
    if dist.get_rank() == 2:
        raise ValueError("as in a script")
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return "the end"


def _extra_collective_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def _leave_a_mess() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    dist.destroy_process_group()


def _see_no_mess() -> tuple[bool, torch.dtype, int]:
    return "LEFT_BEHIND" in os.environ, torch.get_default_dtype(), int(_sum_of_ranks(0).item())


def test_values_come_back_in_rank_order_and_tensors_share_nothing(ranks):
    values = ranks(3)(_sum_of_ranks, 1, scale=2)
    assert [value.tolist() for value in values] == [[12.0]] * 3
    assert values[0].untyped_storage().nbytes() == 4


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_see_the_environment_of_torchrun(ranks, world):
    for rank, seen in enumerate(ranks(world)(_environment)):
        expected = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        expected |= {"LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        assert seen == expected


def test_ranks_import_the_code_that_the_tests_do(ranks):
    """Once they were forked without PYTHONPATH, and tests of a second worktree ran the code of the first."""
    assert ranks(2)(_where_ourshard_is) == [_where_ourshard_is()] * 2


def test_the_first_failing_rank_comes_first(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2)(_rank_one_first)
    assert [(failure.rank, failure.type_name) for failure in caught.value.failures] == [
        (1, "ValueError"),
        (0, "KeyError"),
    ]
    text = str(caught.value)
    assert text.index("the cause") < text.index("second")
    assert "in _rank_one_first" in text
    assert len(ranks(2)(_pid)) == 2


def test_ranks_out_of_step_after_a_failure_are_replaced_without_a_second_error():
    pools = PoolSet()
    try:
        before = pools.ranks(2)(_pid)
        with pytest.raises(RankError, match="rank 1 of 2 failed first"):
            pools.ranks(2)(_rank_one_fails_before_a_collective)
        pools.end_test()
        assert not set(pools.ranks(2)(_pid)) & set(before)
    finally:
        pools.close()


def test_a_rank_left_alone_in_a_collective_is_shown_in_seconds():
    pools = PoolSet()
    try:
        began = time.monotonic()
        with pytest.raises(RankError, match="the cause") as caught:
            pools.ranks(2)(_rank_one_alone_fails)
        assert time.monotonic() - began < 60
        assert "rank 0 is running" in str(caught.value)
        assert "in barrier" in str(caught.value)
    finally:
        pools.close()


def test_a_timeout_shows_the_stacks_of_all_ranks_and_the_pool_recovers(ranks):
    before = ranks(2)(_pid)
    with pytest.raises(RankTimeout) as caught:
        ranks(2)(_wait_where_it_can_be_seen, timeout=1)
    assert str(caught.value).count("in _wait_where_it_can_be_seen") == 2
    after = ranks(2)(_pid)
    assert not set(before) & set(after)
    with pytest.raises(ProcessLookupError):
        os.kill(before[0], 0)


def test_processes_are_kept_between_tests_until_a_rank_dies():
    pools = PoolSet()
    try:
        before = pools.ranks(2)(_pid)
        pools.end_test()
        assert pools.ranks(2)(_pid) == before
        with pytest.raises(RankError, match="exit code -9"):
            pools.ranks(2)(_die)
        pools.end_test()
        assert not set(pools.ranks(2)(_pid)) & set(before)
    finally:
        pools.close()


def test_ranks_out_of_step_fail_the_test_that_left_them():
    pools = PoolSet()
    try:
        pools.ranks(2)(_extra_collective_on_rank_zero)
        with pytest.raises(RankError, match="different numbers of collectives"):
            pools.end_test()
        assert pools.ranks(2)(_sum_of_ranks, 0)[0].item() == 1.0
        pools.end_test()
    finally:
        pools.close()


def test_what_a_test_leaves_behind_is_cleaned():
    pools = PoolSet()
    try:
        before = pools.ranks(2)(_pid)
        pools.ranks(2)(_leave_a_mess)
        pools.end_test()
        assert pools.ranks(2)(_see_no_mess) == [(False, torch.float32, 1)] * 2
        assert pools.ranks(2)(_pid) == before
        pools.end_test()
    finally:
        pools.close()


def test_fresh_processes_end_as_scripts_do(ranks):
    result = ranks(4, fresh=True)(_end_each_in_its_way)
    assert result.exitcodes == [0, 7, 1, -signal.SIGKILL]
    assert result.values == ["the end", None, None, None]
    assert all(f"rank {rank} speaks" in text for rank, text in enumerate(result.stderr))
    assert "ValueError: as in a script" in result.stderr[2]


def test_a_local_function_is_refused_with_the_reason(ranks):
    with pytest.raises(ValueError, match="module-level function"):
        ranks(1)(lambda: None)


def test_a_command_that_hangs_is_killed_with_its_children_and_shows_its_stack():
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with pytest.raises(AssertionError, match="did not end within 2 s") as caught:
        run_cli([sys.executable, "-c", child], timeout=2)
    text = str(caught.value)
    assert "Fatal Python error: Aborted" in text
    pid = int(text.partition("--- stdout\n")[2].split(maxsplit=1)[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
