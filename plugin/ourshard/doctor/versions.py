"""Versions, and combinations that are known not to work."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from ourshard.doctor.finding import Finding, Verdict
from ourshard.runtime.wording import counted

_LEAST = {"torch": "2.10", "accelerate": "1.13", "transformers": "5.3", "peft": "0.18", "trl": "1.0"}
# Their own requirements are looked at: what a package says that it needs is the best list of bad combinations.
_DECLARING = (*_LEAST, "torchvision", "torchaudio", "datasets", "deepspeed", "triton")


def look_at_versions() -> list[Finding]:
    """Return the versions, then each combination that does not work."""
    found = {name: version for name in _LEAST if (version := _version(name)) is not None}
    shown = {"python": platform.python_version(), **found, "ourshard": _version("ourshard") or "not installed"}
    text = ", ".join(f"{name} {version}" for name, version in shown.items())
    return [
        Finding("versions", text, values=shown),
        *_too_old(found),
        *_disagreeing(),
        *_accelerate_seams(),
        *_cuda_build(),
        *_switches(),
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _too_old(found: dict[str, str]) -> Iterator[Finding]:
    for name, version in found.items():
        if not Requirement(f"{name}>={_LEAST[name]}").specifier.contains(version, prereleases=True):
            text = f"{name} {version} is older than {_LEAST[name]}, the oldest that ourshard works with"
            yield Finding("versions", text, Verdict.PROBLEM, f"pip install '{name}>={_LEAST[name]}'")


def _disagreeing() -> Iterator[Finding]:
    """Yield each installed package whose own requirements are not met by what else is installed."""
    for name in _DECLARING:
        if (version := _version(name)) is None:
            continue
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            have = _version(need.name)
            if have is not None and not need.specifier.contains(have, prereleases=True):
                line = f"{name} {version} needs {need.name}{need.specifier}, but {have} is installed"
                yield Finding("versions", line, Verdict.PROBLEM, _fix(name, need))


def _fix(name: str, need: Requirement) -> str:
    """Say what to install; what `name` needs may be older than ourshard works with, and then `name` is too old."""
    least = _LEAST.get(need.name)
    bounded = any(each.operator in ("<", "<=", "==", "~=") for each in need.specifier)
    if least is not None and bounded and not need.specifier.contains(least, prereleases=True):
        return f"pip install -U {name}: ourshard works with {need.name}>={least}"
    return f"pip install '{need.name}{need.specifier}', or another {name}"


def _accelerate_seams() -> Iterator[Finding]:
    import accelerate.accelerator

    from ourshard.integrations import seams

    lost = seams.of_accelerator(accelerate.accelerator)
    if lost:
        fix = f"pip install an accelerate of {seams.TRIED}"
        yield Finding("versions", f"this accelerate lacks {', '.join(lost)}", Verdict.PROBLEM, fix)


def _cuda_build() -> Iterator[Finding]:
    cards = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not cards or torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        text, fix = f"torch {torch.__version__} is built without CUDA", "Install torch's build for CUDA."
    else:
        text = (
            f"torch is built for CUDA {torch.version.cuda} and can't use the driver (or CUDA_VISIBLE_DEVICES is empty)"
        )
        fix = "Update the driver, or install torch for an older CUDA; see what nvidia-smi says."
    yield Finding("GPUs", f"{counted(len(cards), 'GPU')} in this machine, but {text}", Verdict.PROBLEM, fix)


def _switches() -> Iterator[Finding]:
    from ourshard.integrations import switch

    if switch.flag(switch.DISABLE):
        text = "OURSHARD_DISABLE is set: training runs without ourshard"
        yield Finding("switches", text, Verdict.NOTE, "unset OURSHARD_DISABLE")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        text = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: accelerate does not learn of ourshard by itself"
        yield Finding("switches", text, Verdict.NOTE, "unset it, or `import ourshard` first in the script")
