"""`paceline status`: the fleet as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.cli.connection import connect
from paceline.types import Instance, InstanceState, Versions

_STYLES = {
    InstanceState.SERVING: "green",
    InstanceState.STALE: "yellow",
    InstanceState.PAUSED: "yellow",
    InstanceState.DRAINING: "yellow",
    InstanceState.DEAD: "red",
}


def show_status(
    address: str, token: str | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> None:
    """Prints instances and versions."""
    with connect(address, token, ca_file, cert_file, key_file) as client:
        instances, versions = client.instances(), client.versions()
    console = Console()
    console.print(instances_table(instances))
    console.print(f"\n{versions_line(versions)}", highlight=False, markup=False)


def instances_table(instances: Sequence[Instance]) -> Table:
    """A line for each instance."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("instance", "state", "version"):
        table.add_column(name)
    for name in ("running", "waiting", "KV use", "step ms", "tokens"):
        table.add_column(name, justify="right")
    for name in ("device", "address"):
        table.add_column(name)
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
            str(load.generated_tokens),
            instance.device,
            instance.address,
        )
    return table


def versions_line(versions: Versions) -> str:
    """The published versions in words."""
    policy = f"Policy version {versions.policy_version}"
    if versions.policy_path:
        policy += f" from {versions.policy_path}"
    drafter = f", drafter version {versions.drafter_version}" if versions.drafter_version else ""
    update = f"; update {versions.update_id} in progress" if versions.update_id else ""
    return policy + drafter + update
