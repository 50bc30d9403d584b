"""Knobs: what is refused, and which scope wins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.errors import InvalidArgument
from services.contracts.knobs import Knobs, KnobScope, changes, check, merged, resolved
from services.contracts.modes import MODES

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from([*MODES]),
        "speculation": st.booleans(),
        "draft_cap": st.integers(1, 128),
        "margin": st.floats(0, 10),
        "latch": st.booleans(),
        "ladder": st.fixed_dictionaries(
            {}, optional={"on": st.booleans(), "patience": st.integers(1, 9), "up": st.floats(0.9, 1)}
        ),
        "drafters": st.fixed_dictionaries({}, optional={"suffix": st.booleans(), "eagle3": st.booleans()}),
    },
)


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ({"mode": "best"}, "knobs.mode"),
        ({"draft_cap": 0}, "knobs.draft_cap"),
        ({"draft_cap": 2.5}, "knobs.draft_cap"),
        ({"margin": float("nan")}, "knobs.margin"),
        ({"margin": None}, "knobs.margin"),
        ({"speed": 3}, "knobs.speed"),
        ({"ladder": 3}, "knobs.ladder"),
        ({"ladder": {"lengths": [4, 2]}}, "knobs.ladder.lengths"),
        ({"ladder": {"up": 0.5, "down": 0.6}}, "knobs.ladder"),
        ({"drafters": {"N-gram": True}}, "knobs.drafters.N-gram"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(setting: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(setting)
    assert [each.field for each in refused.value.violations] == [field]


def test_numbers_of_a_struct_become_what_they_are() -> None:
    assert check({"draft_cap": 8.0, "ladder": {"lengths": [1.0, 4.0]}}) == {
        "draft_cap": 8,
        "ladder": {"lengths": [1, 4]},
    }


@given(SETTINGS)
def test_a_checked_setting_has_what_was_set_and_nothing_else(setting: dict[str, Any]) -> None:
    checked = check(setting)
    assert checked == setting
    assert check(checked) == checked


@given(st.lists(SETTINGS, max_size=4))
def test_the_narrowest_scope_that_sets_a_knob_wins(settings: list[dict[str, Any]]) -> None:
    knobs = resolved(Knobs(), settings)
    for name in ("mode", "draft_cap", "margin", "latch"):
        said = [setting[name] for setting in settings if name in setting]
        assert getattr(knobs, name) == (said[-1] if said else getattr(Knobs(), name))
    said = [s["drafters"]["suffix"] for s in settings if "suffix" in s.get("drafters", {})]
    assert knobs.drafters.suffix == (said[-1] if said else True)


@given(st.lists(SETTINGS, max_size=4), st.integers(0, 4))
def test_what_is_switched_off_anywhere_is_off(settings: list[dict[str, Any]], place: int) -> None:
    killed = [*settings[:place], {"speculation": False}, *settings[place:]]
    assert not resolved(Knobs(), killed).speculation
    assert merged(killed)["speculation"] is False
    said = [setting.get("speculation", True) for setting in settings]
    assert resolved(Knobs(), settings).speculation == all(said)


@given(st.lists(SETTINGS, max_size=4), SETTINGS)
def test_settings_can_be_merged_before_they_are_resolved(
    settings: list[dict[str, Any]], run: dict[str, Any]
) -> None:
    assert resolved(Knobs(), [merged(settings), run]) == resolved(Knobs(), [*settings, run])


def test_settings_that_do_not_go_together_leave_the_rest_in_force() -> None:
    base = Knobs.model_validate({"ladder": {"up": 0.5, "down": 0.1}})
    knobs = resolved(base, [{"ladder": {"down": 0.7}, "draft_cap": 3}])
    assert knobs.draft_cap == 3
    assert knobs.ladder == base.ladder


@given(SETTINGS, SETTINGS)
def test_changes_tell_what_differs(before: dict[str, Any], after: dict[str, Any]) -> None:
    def leaves(setting: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in setting.items():
            found |= leaves(value, f"{name}.") if isinstance(value, dict) else {prefix + name: value}
        return found

    old, new = leaves(before), leaves(after)
    wanted = {name: (old.get(name), new.get(name)) for name in {*old, *new} if old.get(name) != new.get(name)}
    assert {name: (was, now) for name, was, now in changes(before, after)} == wanted


def test_a_request_names_one_scope() -> None:
    assert KnobScope.of_request() == KnobScope("fleet", "")
    assert KnobScope.of_request(pool="spot") == KnobScope("pool", "spot")
    with pytest.raises(InvalidArgument, match="only one"):
        KnobScope.of_request(run_id="r", model="m")
    with pytest.raises(InvalidArgument, match="longer"):
        KnobScope.of_request(run_id="r" * 257)


@given(st.sampled_from(["model", "pool", "run"]), st.text(min_size=1))
def test_a_scope_is_found_again_by_its_key(kind: Any, name: str) -> None:
    scope = KnobScope(kind, name)
    assert KnobScope.of_key(scope.key) == scope


@pytest.mark.parametrize("key", ["", "fleet", "fleet:x", "run:", "team:x"])
def test_a_key_that_names_no_scope(key: str) -> None:
    with pytest.raises(ValueError, match="no scope"):
        KnobScope.of_key(key)
