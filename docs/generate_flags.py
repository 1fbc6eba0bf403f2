"""Write docs/flags.md from the tables in `ourshard.flags`: `python docs/generate_flags.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ourshard.flags import deepspeed_keys as deepspeed
from ourshard.flags.fsdp import FSDP
from ourshard.flags.language import Flag, Verdict
from ourshard.flags.native import KEYS
from ourshard.flags.parallelism import PARALLELISM
from ourshard.flags.sources import variables

PAGE = Path(__file__).parent / "flags.md"

HEAD = """\
# Flags of FSDP and DeepSpeed

<!-- Written by docs/generate_flags.py from the tables in plugin/ourshard/flags. Change those, then run it. -->

A config that was made for FSDP or DeepSpeed runs on ourshard as it is: keep the file, and set
`ACCELERATE_USE_OURSHARD=true` (or write `distributed_type: OURSHARD`). Each of its keys is one of three:

- **mapped**: it sets a key of `ourshard_config`, or (`run.`) something that Accelerate, the Trainer or the script owns;
- **no meaning here**: there is nothing that it could change; it is named once at the start, with the reason;
- **refused**: it asks for something that is not done here; the run stops with the reason. A value that asks for
  nothing (false, or a block with `enabled: false`) passes.

An unknown key is an error that names the nearest one. Two keys, or two sources, that disagree are an error that names
both; there is no precedence between the file, the environment and arguments. `"auto"` takes the Trainer's or
Accelerate's value, or else is as if it were not there.

`ourshard config translate OLD -o NEW.yaml` writes the native form, `--to fsdp` and `--to deepspeed` go back and say
what has no word there, and `ourshard config show FILE` prints where each value came from. What the workers of a launch
are told, and in whose words, is printed by `accelerate launch --config_file FILE -m ourshard.flags show`.
"""

SECTIONS: tuple[tuple[str, str, Iterable[Flag]], ...] = (
    ("FSDP", "`fsdp_config:` of Accelerate, with or without the `fsdp_` prefix, and `fsdp`, `fsdp_config` of "
     "TrainingArguments; versions 1 and 2.", FSDP.flags),
    ("Accelerate's parallelism_config", "FSDP2 says hybrid shard there.", PARALLELISM.flags),
    ("DeepSpeed: zero_optimization", "`ds_config.json`; the short names are those of `deepspeed_config:` in an "
     "Accelerate YAML.", deepspeed.ZERO),
    ("DeepSpeed: dtypes", "", deepspeed.PRECISION),
    ("DeepSpeed: the run", "", deepspeed.RUN),
    ("DeepSpeed: reports, disk and checkpoints", "", deepspeed.REPORTS),
    ("DeepSpeed: launcher and plugin", "", deepspeed.LAUNCHER),
    ("DeepSpeed: other features", "", deepspeed.OTHER_FEATURES),
    ("DeepSpeed: keys of other files", "In a `ds_config.json` DeepSpeed does not read them.", deepspeed.MISPLACED),
)  # fmt: skip


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, text, flags in SECTIONS:
        parts.append(f"## {title}\n")
        parts += [text + "\n"] if text else []
        parts.append(_table(flags))
    parts.append("## The keys of ourshard_config\n")
    parts.append("Each can be set in the environment, too.\n")
    rows = [f"| `{key}` | `{name}` | {KEYS[key]} |" for name, key in variables().items()]
    parts.append("\n".join(["| key | variable | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _table(flags: Iterable[Flag]) -> str:
    lines = ["| key | verdict | becomes | what happens |", "|---|---|---|---|"]
    for flag in flags:
        names = "<br>".join(f"`{spelling}{'.*' if flag.tree else ''}`" for spelling in flag.spellings)
        target = f"`{flag.target}`" if flag.verdict is Verdict.MAPPED else ""
        lines.append(f"| {names} | {flag.verdict.value} | {target} | {_sentence(flag)} |")
    return "\n".join(lines) + "\n"


def _sentence(flag: Flag) -> str:
    return (flag.reason[0].upper() + flag.reason[1:]).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
