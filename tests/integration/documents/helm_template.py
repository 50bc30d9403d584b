"""`helm template` by the library of the tests, for the commands of the documents."""

from __future__ import annotations

import argparse
from pathlib import Path

import helm_python as helm
import yaml


def main() -> None:
    """Print what a chart renders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["template"])
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--values", type=Path, required=True)
    given = parser.parse_args()
    values = yaml.safe_load(given.values.read_text())
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
