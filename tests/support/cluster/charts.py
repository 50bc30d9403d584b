"""The chart as Helm renders it in a cluster, where templates can look up what is there."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

_LOOKUP = re.compile(r'lookup "[\w/]+" "(\w+)" (\S*)\.Release\.Namespace (\(include [^()]*\)|\S+)')
_FILE = "cluster.json"


def rendered(
    chart: Path,
    values: Mapping[str, Any],
    *,
    name: str,
    namespace: str,
    there: Sequence[Mapping[str, Any]] = (),
    upgrade: bool = False,
) -> list[dict[str, Any]]:
    """Return the manifests of a release.

    Args:
        chart: folder of the chart.
        values: of the release.
        name: of the release.
        namespace: of the release.
        there: manifests in the cluster, which templates look up. The library has no `lookup`, so that the templates
            read a file in its place.
        upgrade: render as `helm upgrade` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / chart.name
        shutil.copytree(chart, copy)
        found = {f"{each['kind']}/{each['metadata']['name']}": each for each in there}
        (copy / _FILE).write_text(json.dumps(found))
        for file in (copy / "templates").rglob("*.*"):
            file.write_text(with_file(file.read_text()))
        texts = helm.Chart.load(str(copy)).render(
            dict(values), name=name, namespace=namespace, is_install=not upgrade, is_upgrade=upgrade
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [
        manifest
        for path, text in sorted(texts.items())
        if not path.endswith("NOTES.txt")
        for manifest in yaml.load_all(text, loader)
        if manifest
    ]


def with_file(template: str) -> str:
    """Return a template that looks up in the file what it would look up in a cluster."""
    text = _LOOKUP.sub(
        lambda found: f'get ({found[2]}.Files.Get "{_FILE}" | fromJson) (printf "{found[1]}/%s" {found[3]})',
        template,
    )
    if "lookup" in re.sub(r"\{\{-? */\*.*?\*/ *-?\}\}", "", text, flags=re.DOTALL):
        raise ValueError("a lookup that is not played")
    return text
