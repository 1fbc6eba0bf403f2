"""`ourshard convert`, `ourshard inspect` and `ourshard verify`."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ourshard.runtime.wording import counted, file_text, memory_text

from .conversion import Report, convert, parse_size
from .inspection import inspect, render
from .registry import writer, writer_names
from .source import CheckpointError, detect
from .verification import Verification, verify

FAILED, USAGE, STOPPED = 1, 2, 130
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _app(command: Callable[..., None], examples: str) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join([*(" ".join(paragraph.split("\n")) for paragraph in paragraphs), examples])
    app.command(no_args_is_help=True, help=text)(command)
    return app


def _fail(error: Exception, code: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
    raise typer.Exit(code)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn what is raised into a message and an exit code."""
    try:
        yield
    except (CheckpointError, PermissionError) as error:
        _fail(error, FAILED)
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        _fail(error, USAGE)
    except OSError as error:
        _fail(error, FAILED)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        raise typer.Exit(STOPPED) from None


class _Bar:
    """A progress bar with bytes and rate, on the terminal only."""

    def __init__(self, what: str, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task(what, total=None)

    def start(self, nbytes: int) -> None:
        """Say how many bytes there are."""
        self._progress.update(self._task, total=nbytes)

    def advance(self, nbytes: int) -> None:
        """Say that so many more are done."""
        self._progress.update(self._task, advance=nbytes)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _formats() -> str:
    names = writer_names()
    return "Format of the result: " + "; ".join(f"[bold]{name}[/] - {writer(name).summary}" for name in names) + "."


_MODEL_OPTION = typer.Option(metavar="N", help="Which model, where the checkpoint holds several; the first is 0.")

_CONVERT_EXAMPLES = """[bold]Examples[/]

A DeepSpeed or FSDP folder to weights for from_pretrained, in bf16:

  ourshard convert checkpoint-500 model --to safetensors --dtype bfloat16

The same with the optimizer, to resume with ourshard on any number of ranks:

  ourshard convert checkpoint-500 resumed --to ourshard

A LoRA adapter merged into its base model:

  ourshard convert adapter merged --to safetensors --merge-adapter --base base-model

What would be written, and what would be lost:

  ourshard convert checkpoint-500 model --to safetensors --dry-run

[bold]Exit codes[/]: 0 written; 1 the checkpoint or the disk is at fault; 2 the command asks for what cannot be done;
130 stopped by Ctrl-C. A conversion that was stopped goes on where it was when the same command is given again."""


_Texts = list[str] | None
_Src = Annotated[
    Path, typer.Argument(metavar="SRC", help="The checkpoint: an outer folder (checkpoint-N), an inner one, or a file.")
]
_Dst = Annotated[
    Path, typer.Argument(metavar="DST", help="The new folder. It appears when all is written, never by halves.")
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        help="Dtype of the weights: float32, bfloat16, float16, or own (what each has in the model). "
        "Default: as stored, the fp32 masters where there are any. The optimizer's state keeps its own."
    ),
]
_WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer and all else of training out.")]
_Rename = Annotated[_Texts, typer.Option(metavar="REGEX=TEXT", help="Rename as re.sub does; repeatable, in order.")]
_Tie = Annotated[
    _Texts, typer.Option(metavar="ALIAS=OWNER", help="Say that two names are one parameter, where no file says so.")
]
_MergeAdapter = Annotated[
    bool, typer.Option("--merge-adapter", help="Add a LoRA to its base weights; the result is the base model.")
]
_MaxShardSize = Annotated[
    str | None, typer.Option(help="Largest file of weights, such as 5GB. Default: 50GB, as Transformers has it.")
]
_WorldSize = Annotated[
    int | None, typer.Option(help="Ranks to cut the files for, in formats cut by rank. Default: as SRC, else 1.")
]
_Workers = Annotated[int | None, typer.Option(help="Threads that read and write. Default: the cores, at most 4.")]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint DST, when the new one is complete.")
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written and what would be lost; write nothing.")
]


def convert_command(
    src: _Src,
    dst: _Dst,
    *,
    to: Annotated[str, typer.Option(help=_formats())],
    dtype: _Dtype = None,
    weights_only: _WeightsOnly = False,
    adapters_only: Annotated[bool, typer.Option("--adapters-only", help="Take the adapter alone.")] = False,
    include: Annotated[_Texts, typer.Option(help="Take only names that fit this glob; repeatable.")] = None,
    exclude: Annotated[_Texts, typer.Option(help="Leave out names that fit this glob; repeatable.")] = None,
    rename: _Rename = None,
    tie: _Tie = None,
    merge_adapter: _MergeAdapter = False,
    base: Annotated[Path | None, typer.Option(help="The base model, if SRC is an adapter alone.")] = None,
    model: Annotated[int | None, _MODEL_OPTION] = None,
    max_shard_size: _MaxShardSize = None,
    world_size: _WorldSize = None,
    memory: Annotated[str, typer.Option(help="Memory that this process may take.")] = "2GiB",
    workers: _Workers = None,
    overwrite: _Overwrite = False,
    dry_run: _DryRun = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no report.")] = False,
) -> None:
    """Convert a checkpoint of any framework to another format.

    The format of SRC is found out. Weights and optimizer state travel in blocks, so that a checkpoint larger than the
    memory is no problem; no GPU, no model code and none of the frameworks is needed. What the result can't hold is
    said.
    """
    with _exit_codes(), _Bar("converting", quiet=quiet or dry_run) as bar:
        report = convert(
            src,
            dst,
            to=to,
            dtype=dtype,
            weights_only=weights_only,
            adapters_only=adapters_only,
            include=include or (),
            exclude=exclude or (),
            rename=rename or (),
            ties=dict(_pair(rule) for rule in tie or ()),
            max_shard_size=max_shard_size,
            world_size=world_size,
            memory=parse_size(memory),
            workers=workers,
            overwrite=overwrite,
            dry_run=dry_run,
            merge_adapter=merge_adapter,
            base=base,
            model=model,
            progress=bar,
        )
    if not quiet:
        _print_report(report, dry_run=dry_run)


def _pair(rule: str) -> tuple[str, str]:
    alias, separator, owner = rule.partition("=")
    if not separator:
        raise ValueError(f"--tie {rule}: write ALIAS=OWNER")
    return alias, owner


def _print_report(report: Report, *, dry_run: bool) -> None:
    console = Console(soft_wrap=True, highlight=False)
    what = f"{counted(report.tensors, 'tensor')}, {file_text(report.nbytes)}"
    if dry_run:
        console.print(f"{escape(str(report.path))} would hold {what} as {report.format} (from {report.source_format})")
    else:
        rate = file_text(report.nbytes / max(report.seconds, 1e-9))
        peak = memory_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT)
        console.print(
            f"{escape(str(report.path))}: {what} as {report.format} (from {report.source_format}) "
            f"in {report.seconds:.1f} s, {rate}/s; at most {peak} of memory"
        )
    if report.losses:
        console.print("Not in the result:")
        for loss in report.losses:
            console.print(f"  - {escape(loss)}")


_INSPECT_EXAMPLES = """[bold]Examples[/]

  ourshard inspect checkpoint-500

  ourshard inspect checkpoint-500 --json | jq .step

[bold]Exit codes[/]: 0 shown; 1 the checkpoint is damaged or incomplete; 2 there is nothing at PATH."""


def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The checkpoint: a folder, outer or inner, or a file.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every tensor.")] = False,
    tensors: Annotated[bool, typer.Option(help="Show the table of all tensors.")] = True,
    model: Annotated[int | None, _MODEL_OPTION] = None,
) -> None:
    """Show what a checkpoint holds: format, world, step, tensors, optimizer, ties, and what is odd.

    Reads headers and indexes, and no tensor; seconds even for a large one.
    """
    with _exit_codes(), detect(path, model=model) as source:
        found = inspect(source)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2, default=str))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200  # names are cut off at the width of a terminal only
        console.print(render(found, tensors=tensors))
    if found.damage:
        raise typer.Exit(FAILED)


_VERIFY_EXAMPLES = """[bold]Examples[/]

  ourshard verify checkpoint-500

  ourshard verify converted --against checkpoint-500

  ourshard verify bf16-model --against checkpoint-500 --tolerance 0.01

[bold]Exit codes[/]: 0 all is well; 1 something is wrong, and is listed; 2 the command was not understood."""


def verify_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The checkpoint: a folder, outer or inner, or a file.")],
    *,
    against: Annotated[Path | None, typer.Option(help="Another checkpoint, of any format, to be equal to.")] = None,
    model: Annotated[int | None, _MODEL_OPTION] = None,
    against_model: Annotated[int | None, typer.Option(metavar="N", help="The same for --against.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of two elements that counts as equal; 0 compares bits.")
    ] = 0.0,
    values: Annotated[bool, typer.Option(help="Count NaN and infinity in every tensor.")] = True,
    config: Annotated[bool, typer.Option(help="Compare shapes with config.json, if Transformers is installed.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Check a checkpoint: every file against its hash, all pieces there, no NaN, shapes as in config.json.

    Formats without hashes are checked as far as they go: headers, lengths, checksums of archives, no piece missing.
    """
    with _exit_codes(), detect(path, model=model) as source, _Bar("verifying", quiet=quiet or as_json) as bar:
        if against is None and against_model is not None:
            raise ValueError("--against-model chooses in the checkpoint of --against, which is not given")
        nbytes = sum(info.nbytes for info in source.tensors.values())
        bar.start(nbytes * (bool(values) + (against is not None)))
        other = detect(against, model=against_model) if against is not None else None
        found = verify(source, against=other, tolerance=tolerance, values=values, config=config, advance=bar.advance)
        if other is not None:
            other.close()
    if as_json:
        typer.echo(json.dumps({"ok": found.ok, **asdict(found)}, indent=2))
    else:
        _print_verification(found)
    if not found.ok:
        raise typer.Exit(FAILED)


def _print_verification(found: Verification) -> None:
    console = Console(soft_wrap=True, highlight=False)
    marks: dict[Any, str] = {False: "[bold red]fault[/]", None: "note"}
    for finding in found.findings:
        console.print(f"{marks[finding.ok]} {finding.check}: {escape(finding.subject)}: {escape(finding.text)}")
    faults = sum(finding.ok is False for finding in found.findings)
    compared = f", {found.compared} compared" if found.compared else ""
    console.print(
        f"{counted(found.files, 'file')}, {counted(found.tensors, 'tensor')} checked{compared}: "
        f"{counted(faults, 'fault') if faults else 'no faults'}"
    )


convert_app = _app(convert_command, _CONVERT_EXAMPLES)
inspect_app = _app(inspect_command, _INSPECT_EXAMPLES)
verify_app = _app(verify_command, _VERIFY_EXAMPLES)
