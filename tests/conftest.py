"""Options, marks and fixtures of all tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rank_pool import PoolSet


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked `slow`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing_gpu = None
    if any(item.get_closest_marker("gpu") for item in items):
        missing_gpu = _why_no_gpu()
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if item.get_closest_marker("gpu") and missing_gpu:
            item.add_marker(pytest.mark.skip(reason=missing_gpu))


# Read here: a fixture of a module may have silenced it before its first test begins.
_LEVEL = logging.getLogger("ourshard").level


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """Put back the level of our logger: what a test silenced, the next one may want to hear."""
    yield
    logging.getLogger("ourshard").setLevel(_LEVEL)


def _why_no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return f"needs a CUDA device; torch {torch.__version__} sees none"


@pytest.fixture(scope="session")
def _pools() -> Iterator[PoolSet]:
    pools = PoolSet()
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools: PoolSet) -> Iterator[Callable[..., Any]]:
    """`ranks(world)(function, *args, timeout=120, **kwargs)`: run on real gloo ranks; see `tests.rank_pool`."""
    yield _pools.ranks
    _pools.end_test()
