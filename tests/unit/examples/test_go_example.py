"""The client in Go names services, methods, messages and fields that the protos have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2

EXAMPLE = Path(__file__).parents[3] / "examples/go"
FILES = (rollout_pb2.DESCRIPTOR, sample_pb2.DESCRIPTOR, weight_pb2.DESCRIPTOR)
MESSAGES = {name: each for file in FILES for name, each in file.message_types_by_name.items()}
ENUMS = {name: each for file in FILES for name, each in file.enum_types_by_name.items()}
SERVICES = {name: each for file in FILES for name, each in file.services_by_name.items()}


def go_name(field: str) -> str:
    """Return the name that protoc-gen-go gives a field."""
    return "".join(part[:1].upper() + part[1:] for part in field.split("_"))


def fields_of(message: str) -> set[str]:
    """Return Go's names of a message's fields and oneofs."""
    described = MESSAGES[message]
    return {go_name(each.name) for each in (*described.fields, *described.oneofs)}


def literals(text: str) -> Iterator[tuple[str, str]]:
    """Yield the type of each literal of a message, and its content without inner literals."""
    for found in re.finditer(r"pb\.(\w+)\{", text):
        depth, begin, kept = 1, found.end(), ""
        for letter in text[begin:]:
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if depth == 0:
                break
            kept += letter if depth == 1 else ""
        yield found[1], kept


def test_what_the_client_names_is_in_the_protos() -> None:
    text = (EXAMPLE / "main.go").read_text()
    seen = set()
    for kind, content in literals(text):
        named = set(re.findall(r"\b([A-Z]\w*): ", content))
        owner, _, member = kind.partition("_")
        if member:  # The wrapper of a field in a oneof.
            assert member in fields_of(owner)
            assert named == {member}
        elif named:
            assert named <= fields_of(kind), kind
        seen.add(owner)
    assert len(seen) > 8
    assert seen <= MESSAGES.keys()
    # The literals of groups leave their type out.
    assert set(re.findall(r"\b(\w+): ", " ".join(re.findall(r"\t\t\{(.*?)\},\n", text)))) <= fields_of(
        "Group"
    )
    read = set(re.findall(r"\.Get(\w+)\(\)", text))
    everything = {name for message in MESSAGES for name in fields_of(message)}
    assert len(read) > 5
    assert read <= everything
    for enum, value in re.findall(r"pb\.(\w+?)_([A-Z][A-Z_]+)\b", text):
        assert value in ENUMS[enum].values_by_name


def test_the_client_calls_methods_that_exist() -> None:
    text = (EXAMPLE / "main.go").read_text()
    assert set(re.findall(r"pb\.New(\w+)Client\(", text)) <= SERVICES.keys()
    methods = {name for service in SERVICES.values() for name in service.methods_by_name}
    called = set(re.findall(r"\b(?:rollouts|weights)\.(\w+)\(", text))
    assert len(called) == 7
    assert called <= methods


def test_the_stubs_are_where_the_template_puts_them() -> None:
    module = re.search(r"^module (\S+)$", (EXAMPLE / "go.mod").read_text(), re.MULTILINE)
    assert module is not None
    template = (EXAMPLE.parents[1] / "buf.gen.yaml").read_text()
    assert f"value: {module[1]}/gen\n" in template
    assert f'pb "{module[1]}/gen/paceline/v1"' in (EXAMPLE / "main.go").read_text()
