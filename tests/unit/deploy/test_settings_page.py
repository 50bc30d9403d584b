"""The page of all settings has each setting of each service, with its text."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pkgutil import resolve_name

import pytest

import services
from deploy.site.settings_page import SERVICES, page
from services.platform.config import ServiceConfig

PAGE = page()


def of_services() -> set[str]:
    """Return the configuration classes of the services; `platform` has only their base classes."""
    found = set[str]()
    for package in pkgutil.iter_modules(services.__path__):
        if package.name == "platform" or importlib.util.find_spec(f"services.{package.name}.config") is None:
            continue
        module = importlib.import_module(f"services.{package.name}.config")
        kinds = [each for each in vars(module).values() if isinstance(each, type)]
        found |= {
            f"{each.__module__}:{each.__name__}"
            for each in kinds
            if issubclass(each, ServiceConfig) and each.__module__ == module.__name__
        }
    return found


def test_no_service_is_left_out() -> None:
    assert set(SERVICES.values()) == of_services()


@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_is_there_and_says_what_it_is(name: str) -> None:
    model = resolve_name(SERVICES[name])
    shared, _, own = PAGE.partition("## `services.")
    (section,) = [part for part in own.split("## `services.") if part.startswith(f"{name}`")]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+) \|$", shared + section, re.MULTILINE)
    assert model.model_fields.keys() <= {row[0] for row in rows}
    assert all(default and value and text.strip() for _, default, value, text in rows)


def test_a_table_has_no_html_of_a_text() -> None:
    assert not re.search(r"<\w", PAGE)
