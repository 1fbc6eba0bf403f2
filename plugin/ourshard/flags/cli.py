"""`ourshard config`: translate, show and write configurations."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ourshard.flags.files import load, write_text
from ourshard.flags.native import comment_of
from ourshard.flags.result import FlagResult
from ourshard.flags.sources import explain, from_environment, merge, read, read_document
from ourshard.flags.translate import compose, elsewhere, translate
from ourshard.runtime.wording import counted

_HELP = """Translate, show and write configurations.

[bold]Examples[/]

An FSDP or DeepSpeed config in the native form, with a comment on each line:

  ourshard config translate fsdp.yaml -o ourshard.yaml

What a file and the environment come to, and which of them said it:

  ourshard config show ourshard.yaml --all

A new file for `accelerate launch`:

  ourshard config write ourshard.yaml --set stage=3,shard_size=node --num-processes 8

[bold]Exit codes[/]: 0 done; 2 the command or a config was not understood."""

app = typer.Typer(
    help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)

_RANK = "RANK"  # the variable that each launcher sets for its workers
SHORT_FORM = "Short form: stage=3,offload.optimizer=cpu."


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """End the command with the message alone when the user's input is wrong, or a file can't be written."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command("translate")
def translate_command(
    old: Annotated[
        Path, typer.Argument(metavar="OLD", help="An Accelerate YAML, a ds_config.json or an fsdp_config.json.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write; stdout if left out.")] = None,
    to: Annotated[str, typer.Option("--to", help="native, fsdp or deepspeed.")] = "native",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over a file that is there.")] = False,
) -> None:
    """Write OLD in another form, with a comment on each line; say what could not be taken along."""
    with _one_line_errors():
        result = translate(old, output or Path("config.yaml"), to)
        for path, text in result.files.items():
            if output is None:
                typer.echo(text, nl=False)
            else:
                _write(path, text, overwrite)
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)


def _write(path: Path, text: str, overwrite: bool) -> None:
    write_text(path, text, overwrite=overwrite)
    typer.echo(f"wrote {path}", err=True)


@app.command("show")
def show_command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A config file; Accelerate's default one if left out.")
    ] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help=SHORT_FORM)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print the keys that nobody set, too.")] = False,
) -> None:
    """Print the resolved config, and where each value came from: the file, the environment and --set.

    Under a launcher rank 0 prints what the launcher told its workers, with the file and section that said it:

        accelerate launch --config_file config.yaml -m ourshard.flags show
    """
    with _one_line_errors():
        path = file or _default_file()
        document = load(path) if path is not None else {}
        results = [from_environment(), *(read(text, "--set") for text in given or ())]
        if path is not None:
            results.insert(0, read_document(document, path.name))
        result = merge(results)
        beside = _of_accelerate(document, path.name if path else "")
        switch = _switch_note(document)
    if as_json:
        config, accelerate = (
            {key: {"value": value, "from": origin} for key, (value, origin) in values.items()}
            for values in (explain(result), beside)
        )
        run, notes = dict(result.run.said), [*switch, *result.notes]
        typer.echo(json.dumps({"config": config, "accelerate": accelerate, "run": run, "notes": notes}, indent=2))
        return
    _print(result, beside, every, switch)


def _switch_note(document: Mapping[str, Any]) -> list[str]:
    """Say of a file that does not ask for ourshard what makes it run on ourshard."""
    asked_for = document.get("distributed_type")
    if asked_for in (None, "OURSHARD") or "ourshard_config" in document:
        return []
    return [f"distributed_type is {asked_for}: set it to OURSHARD, or ACCELERATE_USE_OURSHARD=true in the environment."]


def _of_accelerate(document: Mapping[str, Any], path: str) -> dict[str, tuple[Any, str]]:
    """Return Accelerate's own values that decide how ourshard runs, each with where it came from."""
    told = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "num_processes": "WORLD_SIZE"}
    if _RANK in os.environ:
        return {key: (os.environ[name], name) for key, name in told.items() if name in os.environ}
    return {key: (document[key], path) for key in told if document.get(key) is not None}


def _default_file() -> Path | None:
    """Return the file that `accelerate launch` takes when none is named, if it is there and this is no worker."""
    if _RANK in os.environ:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = Path(os.environ.get("HF_HOME", cache / "huggingface")) / "accelerate"
    found = [home / name for name in ("default_config.yaml", "default_config.json") if (home / name).is_file()]
    return found[0] if found else None


def _print(result: FlagResult, beside: Mapping[str, tuple[Any, str]], every: bool, switch: list[str]) -> None:
    table = Table("key", "value", "from", "meaning", box=None, pad_edge=False)
    for key, (value, origin) in {**beside, **explain(result)}.items():
        if every or key in result.said or key in beside or key == "stage":
            table.add_row(key, _cell(value), origin, comment_of(key))
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width)
    console.print(table)
    for line in (*switch, *elsewhere(result), *result.notes):
        console.print(f"note: {line}", markup=False, highlight=False)


def _cell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (bool, list)) or value is None else str(value)


@app.command("write")
def write_command(
    *,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The YAML to write.")],
    given: Annotated[list[str] | None, typer.Option("--set", help=SHORT_FORM)] = None,
    num_processes: Annotated[int, typer.Option(help="Ranks over all machines.")] = 1,
    num_machines: Annotated[int, typer.Option(help="Machines.")] = 1,
    main_process_ip: Annotated[str, typer.Option(help="Address of the first of several machines.")] = "",
    mixed_precision: Annotated[str, typer.Option(help="no, fp16 or bf16.")] = "bf16",
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on CPUs.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over a file that is there.")] = False,
) -> None:
    """Write a config for `accelerate launch --config_file`, with a comment on each line."""
    with _one_line_errors():
        if mixed_precision not in ("no", "fp16", "bf16"):
            raise ValueError(f"--mixed-precision: {mixed_precision!r} is not one of no, fp16, bf16.")
        if min(num_processes, num_machines) < 1 or num_processes % num_machines:
            raise ValueError(
                f"--num-processes: {counted(num_machines, 'machine')} can't be filled evenly by "
                f"{counted(num_processes, 'rank')}."
            )
        result = merge([read(text, "--set") for text in given or ()])
        accelerate: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "mixed_precision": mixed_precision,
            "num_processes": num_processes,
            "num_machines": num_machines,
            "machine_rank": 0,
            "use_cpu": cpu,
        }
        if num_machines > 1:
            if not main_process_ip:
                raise ValueError("--num-machines above 1 needs --main-process-ip, the address of the first machine.")
            accelerate |= {"main_process_ip": main_process_ip, "main_process_port": 29500, "rdzv_backend": "static"}
        _write(output, compose(result, accelerate), overwrite)
