"""Write the page of the public protocol, from the comments of its files. A hook of MkDocs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from deploy.site.settings_page import cell

PAGE = "protocol.md"
ROOT = Path(__file__).parents[2]
PACKAGE = "paceline.v1"
FILES = ("rollout", "sample", "weight", "weight_stream", "fleet", "knobs")
"""Files of the package, in the order of the page."""
_HEAD = """\
# Protocol

Services and messages of the package `paceline.v1`, from `protos/paceline/v1`. A first call, stubs, deadlines and
reasons of errors are in [gRPC](grpc.md). Other packages are internal, and change without notice.
"""
# Numbers of fields in descriptor.proto; the place of a comment is a path of such numbers.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8
_METHODS = _VALUES = 2

Place = tuple[int, ...]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


@cache
def described() -> tuple[FileDescriptorProto, ...]:
    """Return the files of the package with their comments."""
    command = [
        str(ROOT / ".venv/bin/buf"),
        "build",
        "--path",
        "protos/paceline/v1",
        "--output",
        "-#format=binpb",
    ]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    files = {each.name: each for each in FileDescriptorSet.FromString(found).file}
    return tuple(files[f"{PACKAGE.replace('.', '/')}/{name}.proto"] for name in FILES)


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *(line for each in described() for line in _File(each).lines())])


class _File:
    """A file of the protocol, in Markdown."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(each.path): " ".join((each.leading_comments or each.trailing_comments).split())
            for each in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Yield the services, and then the messages and enumerations."""
        file = self._file
        yield f"\n## `{file.name.rpartition('/')[2]}`\n"
        for number, service in enumerate(file.service):
            yield from self._service(service, (_SERVICES, number))
        for number, message in enumerate(file.message_type):
            yield from self._message(message, message.name, (_MESSAGES, number))
        for number, enum in enumerate(file.enum_type):
            yield from self._enum(enum, enum.name, (_ENUMS, number))

    def _service(self, service: ServiceDescriptorProto, path: Place) -> Iterator[str]:
        yield f"### {service.name}\n"
        yield self._text(path)
        yield "\n| method | request | answer | what it does |\n| --- | --- | --- | --- |"
        for number, method in enumerate(service.method):
            given = f"{'stream of ' * method.client_streaming}{_link(method.input_type)}"
            answer = f"{'stream of ' * method.server_streaming}{_link(method.output_type)}"
            said = self._text((*path, _METHODS, number))
            yield f"| `{method.name}` | {given} | {answer} | {said} |"
        yield ""

    def _message(self, message: DescriptorProto, name: str, path: Place) -> Iterator[str]:
        yield f"### {name}\n"
        yield self._text(path)
        if message.field:
            yield "\n| field | type | what it is |\n| --- | --- | --- |"
        for number, field in enumerate(message.field):
            said = self._text((*path, _FIELDS, number))
            if field.HasField("oneof_index") and not field.proto3_optional:
                group = message.oneof_decl[field.oneof_index].name
                of_group = self._text((*path, _ONEOFS, field.oneof_index))
                said = " ".join(each for each in (f"One of `{group}`.", of_group, said) if each)
            yield f"| `{field.name}` | {_kind(field, message)} | {said} |"
        yield ""
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, f"{name}.{nested.name}", (*path, _NESTED, number))
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*path, _NESTED_ENUMS, number))

    def _enum(self, enum: EnumDescriptorProto, name: str, path: Place) -> Iterator[str]:
        yield f"### {name}\n"
        yield self._text(path)
        yield "\n| value | number | what it is |\n| --- | --- | --- |"
        for number, value in enumerate(enum.value):
            said = self._text((*path, _VALUES, number))
            yield f"| `{value.name}` | {value.number} | {said} |"
        yield ""

    def _text(self, path: Place) -> str:
        return cell(self._comments.get(path, ""))


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Return the type of a field, with a link if the type is on this page."""
    if entry := _map_entry(field, message.nested_type):
        key, value = (_kind(each, entry) for each in entry.field)
        return f"map of {key} to {value}"
    name = _link(field.type_name) if field.type_name else f"`{_scalar(field)}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _map_entry(field: FieldDescriptorProto, nested: Sequence[Any]) -> DescriptorProto | None:
    short = field.type_name.rpartition(".")[2]
    return next((each for each in nested if each.name == short and each.options.map_entry), None)


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(full_name: str) -> str:
    """Return a link to a message or enumeration on this page; for others return the full name."""
    name = full_name.removeprefix(".")
    if not name.startswith(f"{PACKAGE}."):
        return f"`{name}`"
    short = name.removeprefix(f"{PACKAGE}.")
    return f"[{short}](#{short.lower().replace('.', '')})"
