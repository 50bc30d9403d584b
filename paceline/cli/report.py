"""`paceline report`: an HTML page on a run, from the decision log of a platform or from a file of its entries."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import GatewayOptions, connected
from paceline.types import Decision

if TYPE_CHECKING:
    from paceline.report.live import LiveReport

_DAY = 86_400.0
_MOST_RUNS = 20


@connected
def report(
    gateway: GatewayOptions,
    run: Annotated[str, typer.Option(help="Run to report on. Default: the run that ended a step last.")] = "",
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the page on this machine, for a run in progress, until Ctrl-C."),
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --live; 0 picks a free one.", min=0, max=65535)] = 7480,
    refresh: Annotated[
        float, typer.Option(help="Time between updates of --live.", min=0.5, metavar="SECONDS")
    ] = 2.0,
    entries: Annotated[
        Path | None,
        typer.Option(help="File of entries to read, one JSON object per line. Default: ask a platform."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the entries, for --entries. Default: no file.")
    ] = None,
    last: Annotated[
        float,
        typer.Option(
            min=0,
            help="Entries of this many past seconds. Default: a day.",
            show_default=False,
            metavar="SECONDS",
        ),
    ] = _DAY,
) -> None:
    """Write an HTML page on a run.

    It shows which steps were slow and why, reward, time, instances, acceptance and decisions.
    """
    if not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}", param_hint="--output")
    if entries is not None:
        if live:
            raise typer.BadParameter("a file of entries does not change", param_hint="--live")
        read = _read(entries)
    else:
        with gateway.open() as client:
            since = time.time() - last
            if live:
                from paceline.report.live import LiveReport

                client.versions()  # reports a wrong address or token here instead of on the page
                with LiveReport(client, run, since, refresh) as watched:
                    _serve(watched, port)
                    read = watched.entries
            else:
                read = list(client.watch_decisions(run, since, kept=True))
                if run not in ("", *runs_of(read)):
                    read = list(client.watch_decisions("", since, kept=True))  # for the list of known runs
    write_report(read, output, run, save)
    typer.echo(f"Report: {output}")


def write_report(entries: Sequence[Decision], output: Path, run: str = "", save: Path | None = None) -> None:
    """Write the page of a run to `output`, and its entries to `save` if that is given.

    Raises:
        typer.BadParameter: the entries have no finished step of the run.
    """
    from paceline.report.facts import read_facts
    from paceline.report.page import render

    runs = runs_of(entries)
    if run not in ("", *runs):
        named = ", ".join(map(repr, runs[:_MOST_RUNS])) or "none"
        more = f" and {len(runs) - _MOST_RUNS} others" if len(runs) > _MOST_RUNS else ""
        raise typer.BadParameter(
            f"no step of {run!r} has ended in the time of --last; runs with steps: {named}{more}",
            param_hint="--run",
        )
    facts = read_facts(entries, run)
    if save is not None:
        save.write_text("".join(f"{json.dumps(asdict(entry))}\n" for entry in entries))
    output.write_text(render(facts))


def runs_of(entries: Iterable[Decision]) -> list[str]:
    """Return the runs with a finished step, ordered by their last step, the latest first."""
    ends = {entry.run_id: entry.time for entry in entries if entry.kind == "step"}
    return sorted(ends, key=lambda run: -ends[run])


def _serve(watched: LiveReport, port: int) -> None:
    from paceline.report.live import server

    try:
        served = server(watched.page, port)
    except OSError as error:
        raise typer.BadParameter(f"{port} cannot be used: {error}", param_hint="--port") from error
    # Background jobs of a shell ignore SIGINT by default. SIGTERM also ends with a written report.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with served:
        typer.echo(f"Report: http://127.0.0.1:{served.server_port}/   (Ctrl-C to stop)")
        try:
            served.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


def _read(path: Path) -> list[Decision]:
    from paceline.report.facts import parsed

    try:
        return parsed(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--entries") from error
