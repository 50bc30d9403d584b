"""Commands of an operator: status, instances, weight updates, batches of runs, and tokens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import (
    GatewayOptions,
    Json,
    add_columns,
    connected,
    least_width,
    plain_console,
    plain_table,
    print_json,
    print_whole,
    show,
)
from paceline.client import Client
from paceline.tokens import TokenEntry, new_token
from paceline.types import BatchStatus, Instance, InstanceState, Versions

Instances = Annotated[
    list[str] | None,
    typer.Argument(metavar="INSTANCE", help="Instances, as `paceline status` names them. Default: all."),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Run, as its trainer names it.")]

_STYLES = {
    InstanceState.SERVING: "green",
    InstanceState.STALE: "yellow",
    InstanceState.PAUSED: "yellow",
    InstanceState.DRAINING: "yellow",
    InstanceState.DEAD: "red",
}
_STATE: dict[str, Callable[[Instance], str]] = {
    "version": lambda each: str(each.policy_version),
    "running": lambda each: f"{each.load.running}/{each.max_running}",
    "waiting": lambda each: str(each.load.waiting),
}
_LOAD: dict[str, Callable[[Instance], str]] = {
    "KV use": lambda each: f"{each.load.kv_usage:.0%}",
    # Without samples there are no steps.
    "step ms": lambda each: f"{each.load.step_seconds * 1e3:.1f}" if each.load.running else "",
    "tokens": lambda each: short_count(each.load.generated_tokens),
}


@connected
def status(
    gateway: GatewayOptions,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show them again at each change, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the instances and the published versions."""
    with gateway.open() as client:
        if watch:
            with suppress(KeyboardInterrupt):
                _watch_fleet(client, as_json=as_json)
            return
        instances, versions = client.instances(), client.versions()
    if as_json:
        print_json({"instances": instances, "versions": versions})
    else:
        _print_fleet(plain_console(), instances, versions)


def _watch_fleet(client: Client, *, as_json: bool) -> None:
    """Show the fleet at each change, until interrupted."""
    console = plain_console()
    for instances in client.watch_fleet():
        versions = client.versions()
        if as_json:
            print_json({"instances": instances, "versions": versions}, indent=None)
            continue
        console.clear()  # no effect without a terminal
        _print_fleet(console, instances, versions)


def _print_fleet(console: Console, instances: Sequence[Instance], versions: Versions) -> None:
    for table in load_tables(instances, console):
        print_whole(console, table)
        console.print()
    print_whole(console, place_table(instances))
    console.print(f"\n{versions_line(versions)}")


def load_tables(instances: Sequence[Instance], console: Console) -> list[Table]:
    """Return the state and the load of each instance: one table, or two if one is wider than the console."""
    whole = _numbers(instances, _STATE | _LOAD)
    if least_width(console, whole) <= console.width:
        return [whole]
    return [_numbers(instances, _STATE), _numbers(instances, _LOAD)]


def place_table(instances: Sequence[Instance]) -> Table:
    """Return the model, the device and the address of each instance."""
    table = plain_table()
    add_columns(table, "instance", whole=True)
    add_columns(table, "model", "device", "address")
    for instance in instances:
        table.add_row(instance.instance_id, instance.model, instance.device, instance.address)
    return table


def _numbers(instances: Sequence[Instance], columns: Mapping[str, Callable[[Instance], str]]) -> Table:
    table = plain_table()
    add_columns(table, "instance", "state", whole=True)
    add_columns(table, *columns, number=True)
    for instance in instances:
        state = Text(instance.state, _STYLES.get(instance.state, "default"))
        table.add_row(instance.instance_id, state, *(column(instance) for column in columns.values()))
    return table


def short_count(number: int) -> str:
    """Return a count in at most five characters, such as 12.3M; exact below 10,000."""
    if number < 10_000:
        return str(number)
    value = float(number)
    for unit in ("k", "M", "G"):
        value /= 1000
        if value < 999.5:
            return f"{value:.0f}{unit}" if value >= 99.95 else f"{value:.1f}{unit}"
    return f"{value / 1000:.0f}T"


def versions_line(versions: Versions) -> str:
    """Return the published versions as a sentence."""
    policy = f"Policy version {versions.policy_version}"
    if versions.policy_path:
        policy += f" from {versions.policy_path}"
    drafter = f", drafter version {versions.drafter_version}" if versions.drafter_version else ""
    update = f"; update {versions.update_id} in progress" if versions.update_id else ""
    return policy + drafter + update


@connected
def pause(gateway: GatewayOptions, instances: Instances = None) -> None:
    """Pause the steps of instances. No sample is lost: `paceline resume` continues them."""
    with gateway.open(leaders_only=True) as client:
        _echo_instances("paused", client.pause(instances or ()))


@connected
def resume(gateway: GatewayOptions, instances: Instances = None) -> None:
    """Resume paused instances."""
    with gateway.open(leaders_only=True) as client:
        _echo_instances("resumed", client.resume(instances or ()))


@connected
def drain(
    gateway: GatewayOptions,
    instance: Annotated[str, typer.Argument(help="Instance, as `paceline status` names it.")],
) -> None:
    """Drain an instance permanently: its samples continue elsewhere.

    It gets no new samples, and can be stopped after the command. Draining takes as long as its samples take to
    move.
    """
    with gateway.open(leaders_only=True) as client:
        moved = client.drain(instance)
    typer.echo(f"{instance} is drained; {moved} samples continue elsewhere")


def _echo_instances(done: str, instances: Sequence[str]) -> None:
    typer.echo(f"{done}: {', '.join(instances)}" if instances else f"no instance is {done}")


weights_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@weights_app.callback()
def weights() -> None:
    """Weight updates."""


@weights_app.command("show")
@connected
def show_weights(gateway: GatewayOptions, as_json: Json = False) -> None:
    """Show the published versions, and the update in progress."""
    with gateway.open() as client:
        versions = client.versions()
    show(versions, as_json, versions_line)


@weights_app.command("abort")
@connected
def abort_update(
    gateway: GatewayOptions,
    update_id: Annotated[
        str,
        typer.Option(
            "--update", show_default=False, help="Update to abort, if it is still in progress. Default: any."
        ),
    ] = "",
) -> None:
    """Abort the weight update in progress.

    That is done even if a trainer waits for it. Instances discard its data and keep serving the published version;
    the trainer's push fails with ABORTED. Refused once instances have begun to apply the weights.
    """
    with gateway.open(leaders_only=True) as client:
        found = client.versions()
        wanted = update_id or found.update_id
        if not wanted:
            typer.echo(f"no weight update is in progress; version {found.policy_version} is served")
            return
        served = client.abort_update(wanted)
    typer.echo(f"update {wanted} is aborted; version {served} is served")


@connected
def batches(
    gateway: GatewayOptions,
    run: Annotated[str, typer.Option(help="Batches of this run. Default: of all.")] = "",
    as_json: Json = False,
) -> None:
    """Show the unfinished batches, and the last finished ones."""
    with gateway.open(leaders_only=True) as client:
        found = list(client.batches(run))
    if as_json:
        print_json(found)
    elif found:
        print_whole(plain_console(), batches_table(found, time.time()))
    else:
        typer.echo("there are no batches" + (f" of {run}" if run else ""))


@connected
def cancel(
    gateway: GatewayOptions,
    run: RunId,
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Batch, as `paceline batches` names it.")],
) -> None:
    """Cancel the unfinished samples of a batch. Its trainer reads them as cancelled."""
    with gateway.open(leaders_only=True) as client:
        cancelled = client.cancel(run, batch)
    typer.echo(f"{cancelled} samples of batch {batch} were unfinished and are cancelled")


@connected
def end_run(gateway: GatewayOptions, run: RunId) -> None:
    """End a run, and release everything that is kept for it.

    Its unfinished samples are cancelled. Samples that its trainer has not read are lost. The run may begin again.
    """
    with gateway.open(leaders_only=True) as client:
        ended = client.end_run(run)
    typer.echo(
        f"{run} has ended: {ended.batches} batches, of which {ended.cancelled} samples were unfinished"
    )


def batches_table(found: Sequence[BatchStatus], now: float) -> Table:
    """Return a table of batches; `now` is in unix seconds."""
    table = plain_table()
    add_columns(table, "run", "batch", whole=True)
    add_columns(table, "step", "version", "finished", "read", "age", number=True)
    add_columns(table, "state")
    for each in found:
        state = "open" if each.open else "done" if each.finished == each.total else "in work"
        table.add_row(
            each.run_id,
            each.batch_id,
            str(each.step),
            str(each.policy_version),
            f"{each.finished}/{each.total}",
            str(each.acknowledged),
            f"{max(0.0, now - each.accepted_at):.0f} s",
            state,
        )
    return table


def token(
    name: Annotated[str, typer.Option(help="Holder of the token, such as trainer.")],
    scope: Annotated[
        list[str], typer.Option(help="rollouts, weights, fleet or metrics; may be given several times.")
    ],
    requests_per_second: Annotated[
        float | None, typer.Option(help="Limit on RPCs per second, on average. Default: no limit.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="Runs that it may use, such as 'team-a-*': * is any characters, ? one. May be given several "
            "times. Default: any run."
        ),
    ] = None,
    max_queued_samples: Annotated[
        int | None, typer.Option(help="Most unfinished samples at once. Default: no separate limit.")
    ] = None,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of these samples together: prompt and max_tokens. Default: no limit."),
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Hash a token from standard input instead of making one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a token. Print it, and the entry with its hash for the gateway's tokens_file."""
    secret = sys.stdin.readline().strip() if stdin else new_token()
    if not secret:
        _refuse("there is no token on standard input")
    try:
        entry = TokenEntry.of(
            secret, name, scope, requests_per_second, run or (), max_queued_samples, max_queued_tokens
        )
    except ValueError as error:
        _refuse(str(error))
    if as_json:
        made = {} if stdin else {"token": secret}
        typer.echo(json.dumps({**made, "entry": _entry_fields(entry)}, indent=2))
        return
    if not stdin:
        typer.echo(f"# For the caller. It cannot be shown again.\n{secret}\n")
    typer.echo("# For the gateway's tokens_file.")
    typer.echo(entry_yaml(entry))


def entry_yaml(entry: TokenEntry) -> str:
    """Return an entry as an item of a YAML list."""
    # JSON values are YAML values. Quotes keep a name or a hash of digits alone a text.
    return "- " + "\n  ".join(
        f"{field}: {json.dumps(value)}" for field, value in _entry_fields(entry).items()
    )


def _entry_fields(entry: TokenEntry) -> dict[str, str | float | Sequence[str]]:
    fields: dict[str, str | float | Sequence[str]] = {
        "name": entry.name,
        "sha256": entry.sha256,
        "scopes": entry.scopes,
    }
    if entry.runs:
        fields["runs"] = entry.runs
    for field in ("requests_per_second", "max_queued_samples", "max_queued_tokens"):
        limit = getattr(entry, field)
        if limit is not None:
            fields[field] = limit
    return fields


def _refuse(problem: str) -> None:
    """End the command with status 2, because of a wrong option."""
    typer.echo(f"paceline: {problem}", err=True)
    raise typer.Exit(2)
