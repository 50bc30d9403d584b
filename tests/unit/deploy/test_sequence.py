"""Sequence diagrams of the site, drawn when it is built."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deploy.site.sequence import MARGIN, DiagramError, fence, read

DOCS = Path(__file__).parents[3] / "docs"
DIAGRAMS = [
    block
    for path in sorted(DOCS.rglob("*.md"))
    for block in re.findall(r"^```mermaid\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
]


def svg(source: str) -> ElementTree.Element:
    found = ElementTree.fromstring(fence(source)).find("svg")
    assert found is not None
    return found


def test_there_is_a_diagram_of_each_journey() -> None:
    assert len(DIAGRAMS) == 4


@pytest.mark.parametrize("source", DIAGRAMS)
def test_every_participant_and_text_is_drawn_within_the_picture(source: str) -> None:
    diagram, drawn = read(source), svg(source)
    said = " ".join(text.text or "" for text in drawn.iter("text"))
    for text in [*diagram.names, *(event.text for event in diagram.events)]:
        assert text in said
    *_, width, height = map(float, drawn.attrib["viewBox"].split())
    for text in drawn.iter("text"):
        assert MARGIN <= float(text.attrib["x"]) <= width - MARGIN
        assert 0 < float(text.attrib["y"]) < height


def test_an_arrow_leads_from_its_sender_to_its_receiver() -> None:
    heads = "sequenceDiagram\nparticipant A as One\nparticipant B as Two\n"
    there, back = svg(heads + "A->>B: <ask> & wait"), svg(heads + "B-->>A: answer")
    ends = [
        [float(x) for x in re.findall(r"M(\d+) \d+H(\d+)", path.attrib["d"])[0]]
        for drawn in (there, back)
        for path in drawn.iter("path")
        if path.attrib["class"].startswith("arrow")
    ]
    assert ends[0][0] < ends[0][1]
    assert ends[1][0] > ends[1][1]
    assert unescape(there.attrib["aria-label"]) == "<ask> & wait"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("graph TD\nA-->B", "graph TD"),
        ("sequenceDiagram\nparticipant A as One\nA->>B: text", r"names \['B'\]"),
        ("sequenceDiagram\nloop always", "loop always"),
    ],
)
def test_what_cannot_be_drawn_is_refused(source: str, said: str) -> None:
    with pytest.raises(DiagramError, match=said):
        read(source)
