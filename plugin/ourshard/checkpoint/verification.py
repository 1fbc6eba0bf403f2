"""Check a checkpoint: its files, its values, its shapes against config.json, and against another checkpoint."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .source import BUFFER, PARAM, CheckpointError, Source, TensorKey

BLOCK = 2 << 20  # bytes read at a time; see MAX_BLOCK in workspace.py


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `ok` is None for what is worth knowing and no fault."""

    check: str  # "files", "values", "config", "against"
    subject: str  # the file or tensor
    ok: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Verification:
    """All findings that are no plain success, and how much was checked."""

    findings: tuple[Finding, ...]
    files: int
    tensors: int
    compared: int

    @property
    def ok(self) -> bool:
        """Tell whether nothing is wrong."""
        return all(finding.ok is not False for finding in self.findings)


def verify(
    source: Source,
    *,
    against: Source | None = None,
    tolerance: float = 0.0,
    values: bool = True,
    config: bool = True,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Verification:
    """Check files, values (NaN and infinity), shapes against config.json, and all tensors against another checkpoint.

    tolerance: the largest difference of two elements that still counts as equal; 0 compares bits. A damaged file is a
    finding, not an exception. `advance` is told the bytes that were read.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}: it has to be a finite number of 0 or more")
    findings: list[Finding] = []
    files = 0
    for name, problem in source.verify_files():
        files += 1
        if problem is not None:
            findings.append(Finding("files", name, False, problem))
    if config:
        findings += check_config(source)
    checked = 0
    for key in source.tensors if values else ():
        findings += _check_values(source, key, advance)
        checked += 1
    compared = 0
    if against is not None:
        for finding in compare(source, against, tolerance, advance):
            compared += finding.ok is not None
            if finding.ok is not True:
                findings.append(finding)
    return Verification(tuple(findings), files, checked, compared)


def _check_values(source: Source, key: TensorKey, advance: Callable[[int], None]) -> Iterator[Finding]:
    nans = infinities = 0
    try:
        for _, block in source.read_blocks(key, BLOCK):
            if block.dtype.is_floating_point or block.dtype.is_complex:
                wide = block.float() if block.dtype.itemsize < 2 else block  # 8-bit floats have no isfinite
                nans += int(wide.isnan().sum())
                infinities += int(wide.isinf().sum())
            advance(block.numel() * block.dtype.itemsize)
    except (CheckpointError, OSError) as error:
        yield Finding("values", str(key), False, str(error))
    if nans or infinities:
        yield Finding("values", str(key), False, f"{nans} NaN, {infinities} infinite of {source.tensors[key].numel}")


def compare(
    one: Source, other: Source, tolerance: float, advance: Callable[[int], None] = lambda nbytes: None
) -> Iterator[Finding]:
    """Yield a finding for each tensor of either: equal, different, missing. A kind that one side lacks is a note."""
    ours, theirs = _by_name(one), _by_name(other)
    kinds = {key.kind for key in ours} & {key.kind for key in theirs}
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if key.kind not in kinds:
            continue
        if key not in ours or key not in theirs:
            where = one.path if key in ours else other.path
            yield Finding("against", str(key), False, f"is in {where} only")
            continue
        yield _compare((one, ours[key]), (other, theirs[key]), tolerance, advance)
    for kind in sorted({key.kind for key in [*ours, *theirs]} - kinds):
        where = one.path if any(key.kind == kind for key in ours) else other.path
        yield Finding("against", kind, None, f"all of this kind is in {where} only, and was not compared")


def _by_name(source: Source) -> dict[TensorKey, TensorKey]:
    """Return the keys to compare by: parameters and buffers are one kind, since not all formats tell them apart."""
    return {key._replace(kind=PARAM) if key.kind == BUFFER else key: key for key in source.tensors}


def _compare(
    ours: tuple[Source, TensorKey], other: tuple[Source, TensorKey], tolerance: float, advance: Callable[[int], None]
) -> Finding:
    (one, key), (another, other_key) = ours, other
    info, theirs = one.tensors[key], another.tensors[other_key]
    if info.shape != theirs.shape:
        return Finding("against", str(key), False, f"shape {info.shape}, in the other {theirs.shape}")
    if tolerance == 0 and info.dtype != theirs.dtype:
        return Finding("against", str(key), False, f"{info.dtype}, in the other {theirs.dtype}; give a tolerance")
    different, largest = 0, 0.0
    try:
        for start, block in one.read_blocks(key, BLOCK):
            rows = block.shape[0] if info.shape else 1
            count, difference = _difference(block, another.read(other_key, start, start + rows), tolerance)
            different, largest = different + count, max(largest, difference)
            advance(block.numel() * block.dtype.itemsize)
    except (CheckpointError, OSError) as error:
        return Finding("against", str(key), False, str(error))
    if different:
        return Finding("against", str(key), False, f"{different} of {info.numel} differ, by up to {largest:.3g}")
    return Finding("against", str(key), True, "equal")


def _difference(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> tuple[int, float]:
    """Return how many elements differ by more than the tolerance, and the largest difference. NaN equals NaN."""
    if one.dtype == other.dtype and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return 0, 0.0
    wide = torch.complex128 if one.dtype.is_complex else torch.float64
    a, b = one.to(wide), other.to(wide)
    gap = (a - b).abs().nan_to_num(nan=float("inf"))
    gap[(a == b) | (a.isnan() & b.isnan())] = 0.0
    if tolerance == 0:  # bits: +0 and -0, and NaNs of other bits, count as well
        width = one.dtype.itemsize
        bits = (one.reshape(-1).view(torch.uint8) != other.reshape(-1).view(torch.uint8)).reshape(-1, width).any(1)
        return int(bits.sum()), float(gap.max())
    return int((gap > tolerance).sum()), float(gap.max())


def check_config(source: Source) -> list[Finding]:
    """Compare names and shapes with what config.json says: by Transformers' own model class if it is installed."""
    path = source.description.files.get("config.json")
    if path is None or source.description.adapter_config is not None:
        return []
    try:
        config = json.loads(Path(path).read_bytes())
        architecture = config["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return [Finding("config", "config.json", None, "names no architecture; shapes were not compared with it")]
    expected = _expected_shapes(Path(path).parent, architecture)
    if expected is None:
        text = f"shapes were not compared: {architecture} is not a class of an installed Transformers"
        return [Finding("config", "config.json", None, text)]
    return list(_compare_shapes(source, *expected))


def _expected_shapes(folder: Path, architecture: str) -> tuple[dict[str, tuple[int, ...]], set[str]] | None:
    """Return name -> shape of the model, and the names that need not be saved. No code of the checkpoint is run."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None
    try:
        config_class: Any = model_class.config_class
        config = config_class.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = model_class(config)
        model.tie_weights()
    except Exception:  # whatever a model class raises on a config that it does not like
        return None
    whole: dict[str, Any] = model.state_dict()
    owners = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}, set(whole) - owners


def _compare_shapes(source: Source, expected: Mapping[str, tuple[int, ...]], optional: set[str]) -> Iterator[Finding]:
    held = {key.name: info.shape for key, info in source.tensors.items() if key.kind in (PARAM, BUFFER)}
    held.update({alias: held[owner] for alias, owner in source.description.ties.items() if owner in held})
    for name, shape in expected.items():
        if name in held and held[name] != shape:
            yield Finding("config", name, False, f"has shape {held[name]}, config.json means {shape}")
        if name not in held and name not in optional:
            yield Finding("config", name, False, f"is missing; config.json means a tensor of {shape}")
    for name in held.keys() - expected.keys():
        yield Finding("config", name, None, "is no tensor of the model that config.json describes")
