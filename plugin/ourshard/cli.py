"""The command line: `ourshard COMMAND ...`. Each command is a Typer app in a module of its own, imported when it runs.

To add one, write the app and a line in `COMMANDS`. Exit codes: 0 all is well, 1 a check failed or the work could not be
done, 2 the command was not understood or asks for what is not possible.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command's app is, and the line that `ourshard --help` shows."""

    app: str  # "module:name"
    summary: str


COMMANDS: dict[str, Command] = {
    "config": Command(
        "ourshard.flags.cli:app", "Translate a config of FSDP or DeepSpeed, show what is in force, write one."
    ),
    "convert": Command(
        "ourshard.checkpoint.commands:convert_app", "Convert a checkpoint of any framework to another format."
    ),
    "doctor": Command(
        "ourshard.doctor.cli:app", "Measure this machine and its ranks, train a few steps, and say what to mend."
    ),
    "inspect": Command(
        "ourshard.checkpoint.commands:inspect_app", "Show what a checkpoint holds, without reading its tensors."
    ),
    "plan": Command("ourshard.planning.cli:app", "Compare memory, traffic and time of configurations, without a GPU."),
    "verify": Command(
        "ourshard.checkpoint.commands:verify_app", "Check a checkpoint's files and values, or compare it with another."
    ),
}

root = typer.Typer(
    name="ourshard", no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"ourshard {__version__}")
        raise typer.Exit


@root.callback(epilog="Help on one of them: ourshard COMMAND --help")
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Sharded data-parallel training under Accelerate and the Transformers Trainer."""


def _list_commands() -> None:
    """Register a name and a line for each command, for `ourshard --help`; they are run by `main`, not by these."""
    for name, command in COMMANDS.items():
        root.command(name, help=command.summary)(lambda: None)


_list_commands()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in COMMANDS:
        module, name = COMMANDS[arguments[0]].app.split(":")
        app: typer.Typer = getattr(importlib.import_module(module), name)
        app(args=arguments[1:], prog_name=f"ourshard {arguments[0]}")
    root(args=arguments, prog_name="ourshard")


if __name__ == "__main__":
    main()
