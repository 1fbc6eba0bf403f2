"""Readers and writers for the checkpoint formats of others, by name; each module is imported on first use.

`READERS` in the order of detection, as "module:class"; `WRITERS` maps the name for `--to` to "module:class".
"""

from __future__ import annotations

from pathlib import Path

_HERE = "ourshard.checkpoint.foreign"

READERS: tuple[str, ...] = (
    f"{_HERE}.deepspeed:DeepSpeedSource",  # before what ds_to_universal made of it, which holds less
    f"{_HERE}.universal:UniversalSource",
    f"{_HERE}.dcp_source:DcpSource",
    f"{_HERE}.fsdp_files:FsdpFullSource",
    f"{_HERE}.fsdp_files:FsdpRankSource",
    f"{_HERE}.hf_shards:HfShardsSource",
    f"{_HERE}.ddp:DdpSource",
    f"{_HERE}.ddp:PeftSource",
)

WEIGHTS_ALONE = (f"{_HERE}.ddp:PeftSource",)

WRITERS: dict[str, str] = {
    "dcp": f"{_HERE}.dcp_sink:DcpSink",
    "fsdp-full": f"{_HERE}.fsdp_full_sink:FsdpFullSink",
    "deepspeed-universal": f"{_HERE}.universal_sink:UniversalSink",
}


def is_foreign(path: Path) -> bool:
    """Tell whether a folder is a checkpoint of another engine, not of ourshard and not weights alone."""
    if not path.is_dir():
        return False
    from ..registry import load_class

    return any(load_class(reader).find(path) is not None for reader in READERS if reader not in WEIGHTS_ALONE)
