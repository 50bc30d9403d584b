"""Knobs as messages: sparse both ways; values that no message can hold are refused by name."""

from typing import Any

import pytest

from paceline import InvalidArgumentError
from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from paceline.v1 import knobs_pb2
from services.contracts.errors import InvalidArgument
from services.contracts.knobs import Knobs, setting_of


def test_only_set_knobs_are_sent() -> None:
    setting = {"speculation": False, "ladder": {"on": True, "lengths": [1, 2]}, "drafters": {"suffix": False}}
    message = knobs_to_proto(setting)
    assert not message.HasField("mode")
    assert knobs_from_proto(message) == setting
    assert knobs_from_proto(knobs_to_proto({})) == {}


def test_every_knob_has_a_field() -> None:
    everything = Knobs().model_dump(mode="json")
    assert knobs_from_proto(knobs_to_proto(everything)) == everything


@pytest.mark.parametrize(
    ("knobs", "field", "said"),
    [
        ({"speed": 1}, "knobs.speed", "is no knob; there are mode, speculation, "),
        ({"mode": 3}, "knobs.mode", "is 3; must be a text"),
        ({"speculation": "maybe"}, "knobs.speculation", "is 'maybe'; must be true or false"),
        ({"draft_cap": 1.5}, "knobs.draft_cap", "is 1.5; must be a whole number"),
        ({"margin": float("nan")}, "knobs.margin", "is nan; must be a finite number"),
        (
            {"ladder": True},
            "knobs.ladder",
            "is True; must be a group of knobs: on, lengths, up, down, patience",
        ),
        ({"ladder": {"lengths": ["a"]}}, "knobs.ladder.lengths", "must be a list of whole numbers"),
        ({"ladder": {"lengths": []}}, "knobs.ladder.lengths", "is empty"),
        ({"drafters": {"given": "on"}}, "knobs.drafters.given", "is 'on'; must be true or false"),
    ],
)
def test_unknown_knobs_and_wrong_types_are_refused_by_name(
    knobs: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as refused:
        knobs_to_proto(knobs)
    assert [each.field for each in refused.value.violations] == [field]
    assert said in refused.value.violations[0].description


def test_a_service_refuses_knobs_of_a_later_version() -> None:
    later = knobs_pb2.Knobs.FromString(b"\x98\x06\x01")
    with pytest.raises(InvalidArgument, match="does not know"):
        setting_of(later)
    later = knobs_pb2.Knobs(ladder=knobs_pb2.LadderKnobs.FromString(b"\x98\x06\x01"))
    with pytest.raises(InvalidArgument, match="99"):
        setting_of(later)
