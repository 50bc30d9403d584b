"""`helm template` by the library of the tests, for the commands of the documents."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml


def merged(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return values with later ones on top, as Helm merges the files of `--values`."""
    both = {
        key: merged(values[key], later[key])
        for key in values.keys() & later.keys()
        if isinstance(values[key], dict) and isinstance(later[key], dict)
    }
    return values | later | both


def main() -> None:
    """Print what a chart renders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["template"])
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--values", type=Path, action="append", required=True)
    parser.add_argument("--set", action="append", default=[], help="one value: `path.of.it=value`")
    given = parser.parse_args()
    values: dict[str, Any] = {}
    for path in given.values:
        values = merged(values, yaml.safe_load(path.read_text()))
    for name, _, text in (each.partition("=") for each in given.set):
        value = yaml.safe_load(text)
        for key in reversed(name.split(".")):
            value = {key: value}
        values = merged(values, value)
    chart = helm.Chart.load(given.chart)
    chart.validate_schema(values)
    texts = chart.render(
        values, name=given.name, namespace=given.namespace, is_install=True, is_upgrade=False
    )
    for path, text in sorted(texts.items()):
        if not path.endswith("NOTES.txt"):
            print(f"---\n# Source: {path}\n{text}")


if __name__ == "__main__":
    main()
