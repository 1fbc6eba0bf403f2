"""Sizes, rates and times of the command line, with their units or as plain numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import typer

from ourshard.planning.hardware import GB, GIB

_SIZES: Mapping[str, float] = {"GiB": 1, "MiB": 1 / 1024, "TiB": 1024, "GB": GB / GIB, "MB": GB / GIB / 1000}
_RATES: Mapping[str, float] = {"GB/s": 1, "MB/s": 1 / 1000, "Gb/s": 1 / 8, "Gbit/s": 1 / 8, "Gbps": 1 / 8}
_TIMES: Mapping[str, float] = {"us": 1, "ms": 1000}


def parse_size(text: str) -> float:
    """Return GiB: `80`, `80GiB`, `85GB`. The errors of this module are those of the command line."""
    return _parse(text, _SIZES)


def parse_rate(text: str) -> float:
    """Return GB/s: `50`, `50GB/s`, `400Gbit/s`. A small b is a bit."""
    return _parse(text, _RATES)


def parse_time(text: str) -> float:
    """Return microseconds: `30`, `30us`."""
    return _parse(text, _TIMES)


def _parse(text: str, units: Mapping[str, float]) -> float:
    own = next(iter(units))
    match = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?) ?([A-Za-z/]*)", text.strip())
    unit = units.get(match[2] or own) if match else None
    if match is None or unit is None or not 0 < float(match[1]) < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number above 0 of {own}, alone or with one of {', '.join(units)}.")
    return float(match[1]) * unit
