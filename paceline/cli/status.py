"""`paceline status`: the instances and the published versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import GatewayOptions, Json, connected
from paceline.cli.output import add_columns, least_width, plain_table, print_json, print_whole
from paceline.client import Client
from paceline.types import Instance, InstanceState, Versions

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
    "step ms": lambda each: f"{each.load.step_seconds * 1e3:.1f}",
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
                _watch(client, as_json=as_json)
            return
        instances, versions = client.instances(), client.versions()
    if as_json:
        print_json({"instances": instances, "versions": versions})
    else:
        _print(Console(), instances, versions)


def _watch(client: Client, *, as_json: bool) -> None:
    """Show the fleet at each change, without end."""
    console = Console()
    for instances in client.watch_fleet():
        versions = client.versions()
        if as_json:
            print_json({"instances": instances, "versions": versions}, indent=None)
            continue
        console.clear()  # nothing where there is no terminal
        _print(console, instances, versions)


def _print(console: Console, instances: Sequence[Instance], versions: Versions) -> None:
    for table in load_tables(instances, console):
        print_whole(console, table)
        console.print()
    print_whole(console, place_table(instances))
    console.print(f"\n{versions_line(versions)}", highlight=False, markup=False)


def load_tables(instances: Sequence[Instance], console: Console) -> list[Table]:
    """Return the state and the load of each instance: one table, or two where names are too long for one."""
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
        state = f"[{_STYLES.get(instance.state, 'default')}]{instance.state}[/]"
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
    """Return the published versions in words."""
    policy = f"Policy version {versions.policy_version}"
    if versions.policy_path:
        policy += f" from {versions.policy_path}"
    drafter = f", drafter version {versions.drafter_version}" if versions.drafter_version else ""
    update = f"; update {versions.update_id} in progress" if versions.update_id else ""
    return policy + drafter + update
