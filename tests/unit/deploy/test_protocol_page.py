"""The page of the protocol has each public service, method, message and field, with its comment."""

from __future__ import annotations

import re

from deploy.site.protocol_page import FILES, ROOT, described, page

PAGE = page()


def test_no_file_is_left_out() -> None:
    assert {each.stem for each in (ROOT / "protos/paceline/v1").glob("*.proto")} == set(FILES)


def test_every_method_and_message_is_there_and_says_what_it_is() -> None:
    for file in described():
        for service in file.service:
            said = PAGE.partition(f"\n### {service.name}\n")[2].partition("\n### ")[0]
            rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", said, re.MULTILINE))
            assert set(rows) == {method.name for method in service.method}
            assert all(text.strip() for text in rows.values()), service.name
        for message in file.message_type:
            text, rows = described_as(message.name)
            assert [*rows] == [each.name for each in message.field]
            assert text, message.name
            assert [name for name, said in rows.items() if not said.strip()] == [], message.name
        for enum in file.enum_type:
            text, rows = described_as(enum.name)
            assert [*rows] == [each.name for each in enum.value]
            assert text, enum.name
            silent = [name for name, said in rows.items() if not said.strip()]
            assert all(name.endswith("_UNSPECIFIED") for name in silent), enum.name


def described_as(name: str) -> tuple[str, dict[str, str]]:
    """Return the text of a message or enumeration, and the text of each of its rows."""
    said = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    text = said.partition("\n| ")[0].strip()
    return text, dict(re.findall(r"^\| `(\w+)` \|.*?\|(?: (.*))? \|$", said, re.MULTILINE))


def test_links_lead_to_headings_of_the_page() -> None:
    headings = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert len(headings) == len(set(headings))
    places = {each.lower().replace(".", "") for each in headings}
    links = set(re.findall(r"\]\(#(\w+)\)", PAGE))
    assert len(links) > 50
    assert links <= places


def test_a_comment_is_no_html_and_ends_no_table() -> None:
    assert not re.search(r"<\w", PAGE)
    widths = {row.count(" | ") for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)}
    assert widths <= {2, 3}
