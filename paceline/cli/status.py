"""`paceline status`: the instances and the published versions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.cli.options import Address, CaFile, CertFile, Insecure, Json, KeyFile, Token, connect
from paceline.cli.output import add_columns, plain_table, print_json
from paceline.types import Instance, InstanceState, Versions

_STYLES = {
    InstanceState.SERVING: "green",
    InstanceState.STALE: "yellow",
    InstanceState.PAUSED: "yellow",
    InstanceState.DRAINING: "yellow",
    InstanceState.DEAD: "red",
}


def status(
    address: Address = "127.0.0.1:7400",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Show the instances and the published versions."""
    with connect(address, token, ca_file, cert_file, key_file, insecure) as client:
        instances, versions = client.instances(), client.versions()
    if as_json:
        print_json({"instances": instances, "versions": versions})
        return
    console = Console()
    console.print(load_table(instances))
    console.print()
    console.print(place_table(instances))
    console.print(f"\n{versions_line(versions)}", highlight=False, markup=False)


def load_table(instances: Sequence[Instance]) -> Table:
    """Return the state and the load of each instance."""
    table = plain_table()
    add_columns(table, "instance", "state")
    add_columns(table, "version", "running", "waiting", "KV use", "step ms", "tokens", number=True)
    for instance in instances:
        load = instance.load
        table.add_row(
            instance.instance_id,
            f"[{_STYLES.get(instance.state, 'default')}]{instance.state}[/]",
            str(instance.policy_version),
            f"{load.running}/{instance.max_running}",
            str(load.waiting),
            f"{load.kv_usage:.0%}",
            f"{load.step_seconds * 1e3:.1f}",
            short_count(load.generated_tokens),
        )
    return table


def place_table(instances: Sequence[Instance]) -> Table:
    """Return the model, the device and the address of each instance."""
    table = plain_table()
    add_columns(table, "instance", "model", "device", "address")
    for instance in instances:
        table.add_row(instance.instance_id, instance.model, instance.device, instance.address)
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
