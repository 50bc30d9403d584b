"""`paceline policy get | set | watch`: the knobs of speculation, and the platform's decisions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from paceline.cli.connection import Address, CaFile, CertFile, KeyFile, Token, connect
from paceline.types import Decision, Policy

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Run = Annotated[str, typer.Option(help="Knobs of a run.")]
Model = Annotated[str, typer.Option(help="Knobs of a model, as `paceline status` names it.")]
Pool = Annotated[str, typer.Option(help="Knobs of a pool of instances.")]


@app.command("get")
def get(
    address: Address = "127.0.0.1:7400",
    run: Run = "",
    model: Model = "",
    pool: Pool = "",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
) -> None:
    """Shows the knobs that are set: for the fleet, or for a run, a model or a pool."""
    with connect(address, token, ca_file, cert_file, key_file) as client:
        policy = client.policy(run, model=model, pool=pool)
    typer.echo(json.dumps({"revision": policy.revision, "knobs": dict(policy.knobs)}, indent=2))


@app.command("set")
def set_(
    knobs: Annotated[
        list[str],
        typer.Argument(
            help="name=value, such as mode=toggle speculation=false ladder.on=true; name= unsets."
        ),
    ],
    address: Address = "127.0.0.1:7400",
    run: Run = "",
    model: Model = "",
    pool: Pool = "",
    revision: Annotated[
        int | None,
        typer.Option(help="Only if nothing has changed since this revision. Default: the present one."),
    ] = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
) -> None:
    """Changes knobs. `paceline policy set speculation=false` turns everything to plain decoding at once."""
    with connect(address, token, ca_file, cert_file, key_file) as client:
        policy = client.policy(run, model=model, pool=pool)
        changed = Policy(policy.revision if revision is None else revision, with_changes(policy.knobs, knobs))
        change = client.set_policy(run, changed, model=model, pool=pool)
    typer.echo(f"revision {change.revision}; {len(change.applied)} instances work by it")
    if change.pending:
        typer.echo(f"not reached yet, will be tried again: {', '.join(change.pending)}")


@app.command("watch")
def watch(
    address: Address = "127.0.0.1:7400",
    run: Annotated[str, typer.Option(help="Decisions of this run and of the fleet. Default: all.")] = "",
    last: Annotated[float, typer.Option(min=0, help="Begin with those of so many seconds ago.")] = 0,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
) -> None:
    """Prints decisions as they are made, until Ctrl-C."""
    with connect(address, token, ca_file, cert_file, key_file) as client:
        try:
            for decision in client.watch_decisions(run, time.time() - last):
                typer.echo(decision_line(decision))
        except KeyboardInterrupt:
            return


def decision_line(decision: Decision) -> str:
    """A decision in one line."""
    at = time.strftime("%H:%M:%S", time.localtime(decision.time))
    gain = f" {decision.predicted_gain:+.0%}" if decision.predicted_gain else ""
    return f"{at} {decision.run_id or 'fleet'} {decision.kind}{gain}: {decision.reason}"


def with_changes(knobs: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Knobs after `name=value` assignments; nested names have dots, and an empty value unsets.

    Raises:
        typer.BadParameter: one is no assignment.
    """
    changed: dict[str, Any] = json.loads(json.dumps(dict(knobs)))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not all(name.split(".")):
            raise typer.BadParameter(f"{assignment!r} is not name=value")
        *parents, leaf = name.split(".")
        place = changed
        for parent in parents:
            below = place.setdefault(parent, {})
            if not isinstance(below, dict):
                raise typer.BadParameter(f"{parent} of {assignment!r} is no group of knobs")
            place = below
        if text:
            place[leaf] = _value(text)
        else:
            place.pop(leaf, None)
    return changed


def _value(text: str) -> Any:
    """JSON, or else a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text
