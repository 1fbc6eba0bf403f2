"""Write docs/commands.md from the help of the commands: `python docs/generate_commands.py`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from ourshard.cli import COMMANDS

PAGE = Path(__file__).parent / "commands.md"

HEAD = """\
# Commands

<!-- Written by docs/generate_commands.py from the help texts of the commands. Change those, then run it. -->

`ourshard COMMAND --help` prints the same. `ourshard --version` prints the version.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name, entry in COMMANDS.items():
        module, app = entry.app.split(":")
        command = typer.main.get_command(getattr(importlib.import_module(module), app))
        parts += _section(f"ourshard {name}", command, 2)
    return "\n".join(parts)


def _section(path: str, command: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {path}\n"
    yield _prose(command.help or "")
    inner = getattr(command, "commands", None)
    if inner:
        for name, sub in inner.items():
            yield from _section(f"{path} {name}", sub, level + 1)
        return
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    yield "\n".join(["| | | default |", "|---|---|---|", *rows]) + "\n"


def _prose(text: str) -> str:
    """Turn help text into Markdown: rich's bold into Markdown's, indented commands into blocks."""
    text = re.sub(r"\[bold\](.*?)\[/\]", r"**\1**", text)
    paragraphs = [part.strip("\n") for part in text.split("\n\n")]
    return "\n\n".join(f"    {part.strip()}" if part.startswith("  ") else part.strip() for part in paragraphs) + "\n"


def _row(parameter: Any) -> str:
    option = isinstance(parameter, click.Option) or getattr(parameter, "param_type_name", "") == "option"
    names = (
        ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        if option
        else f"`{parameter.name.upper()}`"
    )
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) or not option else f"`{default}`"
    needed = "required" if parameter.required else shown
    text = re.sub(r"\[bold\](.*?)\[/\]", r"**\1**", getattr(parameter, "help", "") or "")
    return f"| {names} | {text.replace('|', chr(92) + '|')} | {needed} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
