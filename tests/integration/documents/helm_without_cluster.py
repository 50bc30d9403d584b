"""`helm template`, `install` and `upgrade` by Helm's library, for the commands of the documents.

`install` is Helm's own with `--dry-run=client`: it renders and checks everything, and sends nothing. An upgrade
asks a server for the release that it changes, so `upgrade` renders as one does.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from tests.support.ports import NOBODY


def merged(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return values with later ones on top, as Helm merges the files of `--values`."""
    both = {
        key: merged(values[key], later[key])
        for key in values.keys() & later.keys()
        if isinstance(values[key], dict) and isinstance(later[key], dict)
    }
    return values | later | both


def main() -> None:
    """Print what a command would send."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["template", "install", "upgrade"])
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--values", type=Path, action="append", required=True)
    parser.add_argument("--set", action="append", default=[], help="one value: `path.of.it=value`")
    given = parser.parse_args()
    values: dict[str, Any] = {}
    for each in (
        *(yaml.safe_load(path.read_text()) for path in given.values),
        *map(helm.parse_set_string, given.set),
    ):
        values = merged(values, each)
    if given.command == "install":
        with helm.Config(namespace=given.namespace, storage_driver="memory", kube_apiserver=NOBODY) as config:
            print(config.install(given.chart, given.name, values, dry_run="client")["manifest"])
        return
    chart = helm.Chart.load(given.chart)
    chart.validate_schema(values)
    upgrade = given.command == "upgrade"
    texts = chart.render(
        values, name=given.name, namespace=given.namespace, is_install=not upgrade, is_upgrade=upgrade
    )
    for path, text in sorted(texts.items()):
        if not path.endswith("NOTES.txt"):
            print(f"---\n# Source: {path}\n{text}")


if __name__ == "__main__":
    main()
