"""The report as a table and a last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ourshard.doctor.finding import Finding, Verdict
from ourshard.runtime.wording import counted

if TYPE_CHECKING:
    from ourshard.doctor.examination import Report

_STYLES = {Verdict.FINE: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


def as_table(report: Report) -> Table:
    """Return a row for each finding; what is fine on several ranks in the same way is one row, the first rank's."""
    table = Table(
        "looked at", "verdict", "found", title=f"ourshard doctor, {counted(report.world, 'rank')}", show_lines=False
    )
    alike: dict[str, int] = {}
    for finding in report.findings:
        if finding.verdict is Verdict.FINE:
            alike[finding.name] = alike.get(finding.name, 0) + 1
    shown: set[str] = set()
    for finding in report.findings:
        if finding.verdict is Verdict.FINE and finding.name in shown:
            continue
        more = alike.get(finding.name, 0) - 1 if finding.verdict is Verdict.FINE else 0
        if finding.verdict is Verdict.FINE:
            shown.add(finding.name)
        style = _STYLES[finding.verdict]
        table.add_row(escape(finding.name), f"[{style}]{finding.verdict.value}[/]", _text(finding, report.world, more))
    return table


def _text(finding: Finding, world: int, more: int) -> str:
    text = escape(finding.text)
    if more:
        text += f" (and {counted(more, 'rank')} more)"
    if finding.verdict is not Verdict.FINE and 0 < len(finding.ranks) < world:
        text = f"rank {', '.join(map(str, finding.ranks))}: {text}"
    return f"{text}\n  fix: {escape(finding.fix)}" if finding.fix else text


def verdict_line(report: Report) -> str:
    """Return the last line: is it healthy, and how long it took."""
    counts = {verdict: sum(f.verdict is verdict for f in report.findings) for verdict in Verdict}
    problems, notes = counts[Verdict.PROBLEM], counts[Verdict.NOTE]
    said = (
        f"[bold red]{counted(problems, 'problem')}[/], to be mended before training"
        if problems
        else "[green]healthy[/]"
    )
    return f"{said}; {counted(notes, 'note')}; {report.seconds:.1f} s"
