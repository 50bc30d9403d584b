"""Translate knobs between mappings and messages.

A setting names only the knobs that it sets: `{"mode": "toggle", "ladder": {"on": True}}`. The service checks the
values; here only what has no place in a message is refused, in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from paceline.client_errors import invalid_argument
from paceline.v1 import knobs_pb2

Faults = dict[str, str]
"""What is wrong, by the field's dotted name."""


def knobs_to_proto(knobs: Mapping[str, Any]) -> knobs_pb2.Knobs:
    """Return the knobs as a message; what the mapping does not name stays unset.

    Raises:
        InvalidArgumentError: a name is no knob, or a value is not of its knob's type; `violations` names it.
    """
    message = knobs_pb2.Knobs()
    if not isinstance(knobs, Mapping):
        raise invalid_argument(
            {"knobs": f"is a {type(knobs).__name__}; must be a mapping of names to values"}
        )
    faults: Faults = {}
    _fill(message, knobs, "knobs", faults)
    if faults:
        raise invalid_argument(faults)
    return message


def knobs_from_proto(message: knobs_pb2.Knobs) -> dict[str, Any]:
    """Return the knobs that are set, by name."""
    values: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return values


def _fill(message: Message, values: Mapping[str, Any], path: str, faults: Faults) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        place = f"{path}.{name}"
        field = fields.get(name)
        if field is None:
            faults[place] = f"is no knob; there are {', '.join(fields)}"
        elif field.message_type is not None and isinstance(value, Mapping):
            group: Message = getattr(message, name)
            group.SetInParent()
            _fill(group, value, place, faults)
        elif isinstance(value, list | tuple) and not value:
            faults[place] = "is empty; leave it out to unset it"
        else:
            try:
                values_by_name = {name: list(value) if isinstance(value, tuple) else value}
                json_format.ParseDict(values_by_name, message)
            except json_format.ParseError:
                faults[place] = f"is {value!r}, which is not a value of this knob's type"
