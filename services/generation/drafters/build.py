"""Build the drafters of an engine by name, from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import structlog

from services.contracts.drafters import RegisteredDrafter, registered
from services.generation.drafters.guest import build_guest
from services.generation.speculation.drafter import DrafterSetting, TokenDrafter

_log = structlog.get_logger(__name__)


def build_drafters(
    names: Iterable[str],
    setting: DrafterSetting,
    left_out: Callable[[str], None],
    places: Mapping[str, str] = MappingProxyType({}),
) -> list[TokenDrafter]:
    """Return the drafters of these names, which are registered; building some of them imports numba.

    A drafter of another package that cannot be built is left out: the fault is logged, and `left_out` is called
    with its name. Faults of other drafters are raised. `places` replaces the registered class of some drafters.
    """
    known, found = registered(), list[TokenDrafter]()
    for name in names:
        drafter = known[name]
        if name in places:
            drafter = replace(drafter, place=places[name])
        try:
            found.append(_built(drafter, setting))
        except Exception as error:
            if drafter.own:
                raise
            _log.error("drafter_left_out", drafter=name, place=drafter.place, fault=repr(error))
            left_out(name)
    return found


def _built(drafter: RegisteredDrafter, setting: DrafterSetting) -> TokenDrafter:
    setting = replace(setting, options=setting.config.drafter_options.get(drafter.name, {}))
    if not drafter.own:
        return build_guest(drafter, setting)
    made: type[TokenDrafter] = drafter.load()
    return made.build(replace(setting, options=made.Options.model_validate(setting.options)))
