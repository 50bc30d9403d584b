"""Write the page of all settings, from the services' configuration classes. A hook of MkDocs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from helm.generate import SETTINGS
from services.platform.config import LeaderConfig, ServiceConfig, TlsConfig

PAGE = "settings.md"
SERVICES = {name: where for name, where in SETTINGS.items() if name != "scaling"}
SERVICES["ray"] = "services.ray.config:RayConfig"
"""Services, with the classes of their settings. `scaling` is a group of settings of the policy service."""
_HEAD = """\
# Settings

Each setting is a flag (`--max-message-bytes`), an environment variable (`PACELINE_MAX_MESSAGE_BYTES`; of a group
`PACELINE_TLS__CA_FILE`), and a key of the YAML file that `--config` names. Flags come before variables, variables
before the file. In the chart settings stand in the `config` of a component. A name that is not known is an error.
"""
_LIMITS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
    ("minLength", "characters: at least"),
    ("maxLength", "characters: at most"),
    ("pattern", "matches"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Return the page in Markdown."""
    parts = [_HEAD]
    parts += _section("## All services", "", ServiceConfig, ())
    parts += _section("## TLS", "tls.", TlsConfig, ())
    parts += _section("## Services of which one replica leads", "", LeaderConfig, ServiceConfig.model_fields)
    for name, where in SERVICES.items():
        model: type[ServiceConfig] = resolve_name(where)
        shared = LeaderConfig if issubclass(model, LeaderConfig) else ServiceConfig
        same = [each for each in shared.model_fields if _field(model, each) == _field(shared, each)]
        parts += _section(f"## `services.{name}`", "", model, same)
    return "\n".join(parts)


def _section(heading: str, prefix: str, model: type[BaseModel], left_out: Collection[str]) -> Iterator[str]:
    """Yield the settings of a class and of its groups in Markdown; `prefix` is put before their names."""
    schema = model.model_json_schema()
    groups = list[tuple[str, type[BaseModel]]]()
    yield f"\n{heading}\n"
    yield "| setting | default | value | what it is |\n| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        if name in left_out:
            continue
        if (inner := _group(field.annotation)) is not None and inner is not TlsConfig:
            groups.append((prefix + name, inner))
        found = schema["properties"][name]
        text = " ".join((field.description or "").split())
        value = _value(found, schema.get("$defs", {}))
        yield f"| `{prefix}{name}` | {_default(field)} | {cell(value)} | {cell(text)} |"
    for path, inner in groups:
        yield from _section(f"### `{path}`", f"{path}.", inner, ())


def _field(model: type[BaseModel], name: str) -> tuple[Any, str | None]:
    field = model.model_fields[name]
    return field.default, field.description


def _group(annotation: Any) -> type[BaseModel] | None:
    """Return the group of settings that an annotation such as `TlsConfig | None` names."""
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _default(field: Any) -> str:
    value = field.default if field.default_factory is None else field.default_factory()
    if value is PydanticUndefined:
        return "must be set"
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, str | list | tuple | set | frozenset | dict) and not value:
        return "none"
    if field.default_factory is not None:
        return "of the machine"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{cell(str(getattr(value, 'value', value)))}`"


def _value(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Describe the values of a field."""
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    if choices := schema.get("anyOf"):
        return " or ".join(
            dict.fromkeys(_value(each, known) for each in choices if each.get("type") != "null")
        )
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_value(schema.get('items', {}), known) or 'values'}"
    kind = {"object": "group", "string": schema.get("format", "text")}.get(
        schema.get("type", ""), schema.get("type", "")
    )
    limits = [f"{words} `{schema[key]}`" for key, words in _LIMITS if key in schema]
    return ", ".join([kind, *limits])


def cell(text: str) -> str:
    """Return a text as a cell of a table, without HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")
