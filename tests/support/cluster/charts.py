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
_VERSION = re.compile(r"[$.\w]*\.Capabilities\.HelmVersion\.Version")
_APIS = re.compile(r'[$.\w]*\.Capabilities\.APIVersions\.Has ("[^"]*"|\$\w+)')
_FILE = "cluster.json"


def rendered(chart: Path, values: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the manifests of a release, those of hooks among them. Takes the options of `texts`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [
        manifest
        for path, text in sorted(texts(chart, values, **options).items())
        if not path.endswith("NOTES.txt")
        for manifest in yaml.load_all(text, loader)
        if manifest
    ]


def notes(chart: Path, values: Mapping[str, Any], **options: Any) -> str:
    """Return the notes of a release. Takes the options of `texts`."""
    found = texts(chart, values, **options)
    return next(text for path, text in found.items() if path.endswith("NOTES.txt"))


def texts(
    chart: Path,
    values: Mapping[str, Any],
    *,
    name: str,
    namespace: str,
    there: Sequence[Mapping[str, Any]] = (),
    upgrade: bool = False,
    version: str = "v4.2.3",
    apis: Sequence[str] | None = None,
) -> dict[str, str]:
    """Return the texts that the templates of a release make, by their paths.

    Args:
        chart: folder of the chart.
        values: of the release.
        name: of the release.
        namespace: of the release.
        there: manifests in the cluster, which templates look up. The library has no `lookup`, so that the templates
            read a file in its place.
        upgrade: render as `helm upgrade` does.
        version: of Helm.
        apis: group/version or group/version/Kind that the cluster has. None: there is no cluster, as for `helm
            template`, and nothing is checked.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / chart.name
        shutil.copytree(chart, copy)
        found = {f"{each['kind']}/{each['metadata']['name']}": each for each in there}
        (copy / _FILE).write_text(json.dumps(found))
        for file in (copy / "templates").rglob("*.*"):
            text = _VERSION.sub(json.dumps(version), with_file(file.read_text()))
            if apis is not None:
                known = " ".join(map(json.dumps, apis))
                text = _APIS.sub(lambda asked, known=known: f"has {asked[1]} (list {known})", text)
            file.write_text(text)
        given = dict(values) if apis is not None else {"checkCluster": False, **values}
        return helm.Chart.load(str(copy)).render(
            given, name=name, namespace=namespace, is_install=not upgrade, is_upgrade=upgrade
        )


def with_file(template: str) -> str:
    """Return a template that looks up in the file what it would look up in a cluster."""
    text = _LOOKUP.sub(
        lambda found: f'get ({found[2]}.Files.Get "{_FILE}" | fromJson) (printf "{found[1]}/%s" {found[3]})',
        template,
    )
    if "lookup" in re.sub(r"\{\{-? */\*.*?\*/ *-?\}\}", "", text, flags=re.DOTALL):
        raise ValueError("a lookup that is not played")
    return text
