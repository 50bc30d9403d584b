"""Generate the parts of the chart that follow from other files: `scripts/chart`.

- the table of values in README.md, from the comments of values.yaml;
- the settings of every service in values.schema.json, from its configuration class, so that the chart
  refuses values that the service would refuse;
- there, too, the values of `pods`, which every component takes as well.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml
from pydantic import BaseModel

from services.platform.config import ServiceConfig

SETTINGS = {
    "gateway": "services.gateway.config:GatewayConfig",
    "generation": "services.generation.config:GenerationConfig",
    "reallocator": "services.reallocator.config:ReallocatorConfig",
    "bubbles": "services.bubbles.config:BubblesConfig",
    "drafts": "services.drafts.config:DraftsConfig",
    "drafter": "services.drafter.config:DrafterConfig",
    "policy": "services.policy.config:PolicyConfig",
    "facade": "services.facade.config:FacadeConfig",
    "scaling": "services.policy.config:ScalingConfig",
}
"""Names of settings in the schema, and the class that has them."""
SHARED = {
    *("log_level", "log_format", "shutdown_grace_seconds", "max_message_bytes"),
    *("max_concurrent_calls", "max_parsed_bytes", "max_connections"),
    *("max_connection_age_seconds", "max_connection_age_grace_seconds"),
}
"""Of the settings that all services share, those that are left to the chart's user."""
CHOSEN = {
    *("instance_id", "replica_id", "pool", "snapshot_dir", "migration_port", "evacuation_seconds", "scaling"),
    *("folder", "checkpoint", "device"),
    *("pools", "gateway", "probe_port", "apply", "identity", "lease_name"),
    *("kubernetes_namespace", "kubernetes_url", "kubernetes_ca_file"),
}
"""Settings of single services that the chart makes itself, from other values."""
PODS = (
    *("gateway", "reallocator", "bubbles", "policy", "facade", "drafter", "drafts", "redis.embedded"),
    *("generation.defaults", "generation.pools.items", "model.download"),
)
"""Where the schema has the values of `pods` again: each component replaces what is said for all."""
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- end of values -->)", re.DOTALL)
_KEY = re.compile(r"^( *)(?:- )?([A-Za-z_][\w]*):(?: (.*))?$")
_KEPT = (
    "type",
    "enum",
    "const",
    "items",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "pattern",
)


@dataclass(frozen=True, slots=True)
class Value:
    """A documented value: its path, such as gateway.replicas, its default and its meaning."""

    path: str
    default: Any
    text: str


def documented(text: str) -> Iterator[Value]:
    """Yield the values of a values.yaml whose comments begin with `# --`."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            comment = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#") and comment:
            comment.append(stripped.removeprefix("#").strip())
        elif key := _KEY.match(line):
            indent = len(key[1])
            path = [*(each for each in path if each[0] < indent), (indent, key[2])]
            if comment:
                names = [name for _, name in path]
                yield Value(".".join(names), _at(values, names), " ".join(comment))
            comment = []


def table(values: Iterator[Value]) -> str:
    """Return the values as a Markdown table."""
    rows = [f"| `{each.path}` | `{json.dumps(each.default)}` | {each.text} |" for each in values]
    return "\n".join(["| value | default | what it is |", "| --- | --- | --- |", *rows]) + "\n"


def settings(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of the settings of `model` that the chart leaves to its user."""
    schema = model.model_json_schema()
    known = schema.get("$defs", {})
    kept = schema["properties"].keys() - CHOSEN - (ServiceConfig.model_fields.keys() - SHARED)
    properties = {name: _plain(schema["properties"][name], known) for name in sorted(kept)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def generate(chart: Path) -> None:
    """Write both files of the chart."""
    readme = chart / "README.md"
    rows = table(documented((chart / "values.yaml").read_text()))
    readme.write_text(_TABLE.sub(lambda _: rows, readme.read_text()))
    path = chart / "values.schema.json"
    schema = json.loads(path.read_text())
    for name, where in SETTINGS.items():
        schema["$defs"][f"{name}Settings"] = settings(resolve_name(where))
    for where in PODS:
        holder = schema
        for name in where.split("."):
            holder = holder[name] if name == "items" else holder["properties"][name]
        for name in schema["properties"]["pods"]["properties"]:
            if (where, name) == ("model.download", "updateStrategy"):
                continue  # a Job has none
            holder["properties"][name] = {"$ref": f"#/properties/pods/properties/{name}"}
    path.write_text(json.dumps(schema, indent=2) + "\n")


def _at(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[name]
    return values


def _plain(schema: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a field's schema that limits its values; without null, which in Helm deletes a value."""
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    choices = [each for each in schema.get("anyOf", []) if each.get("type") != "null"]
    if len(choices) == 1:
        return _plain(choices[0], known)
    if choices:
        return {"anyOf": [_plain(each, known) for each in choices]}
    found = {name: schema[name] for name in _KEPT if name in schema}
    if isinstance(found.get("items"), Mapping):
        found["items"] = _plain(found["items"], known)
    return found


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
