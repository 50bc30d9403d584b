"""The page: one valid document, whole without a network, readable without colours, sight or a pointer."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from paceline import types as t
from paceline.report import chart
from paceline.report.chart import element, short, ticks
from paceline.report.facts import Filled, FleetNow, RunFacts, read_facts
from paceline.report.page import MOST_DECISIONS, render, tiles
from paceline.report.plots import PART_CLASSES, PHASES
from tests.unit.report.facts_of_a_run import BEGIN, run_entries

VOID = {"meta", "br", "hr", "img", "input", "link"}
THEMES = {"light": chart.LIGHT, "dark": chart.DARK}
# Machado and others 2009, severity 1: how linear RGB looks to those who lack one kind of cone.
DEFICIENCIES = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


class Reader(HTMLParser):
    """Reads a document strictly: every element is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.words: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute of {tag} stands twice"
        self.elements.append((tag, {name: value or "" for name, value in attrs}, tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag]
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words[self.open[-1]] = self.words.get(self.open[-1], "") + data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


@pytest.fixture(scope="module")
def facts() -> RunFacts:
    return read_facts(run_entries())


@pytest.fixture(scope="module")
def page(facts: RunFacts) -> str:
    return render(facts)


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    return Reader(page)


def with_now(facts: RunFacts) -> RunFacts:
    load = t.InstanceLoad(3, 1, 0.5, 0.01, 10, 10)
    instance = t.Instance(
        "i<0>", 1, "h:1", t.InstanceState.SERVING, 3, load, 8, 100, 10, "m", "cpu", 1.0, "h:2"
    )
    batch = t.BatchStatus("run", "b", 7, 3, BEGIN, 8, 5, 0, 5)
    facts.now = FleetNow(BEGIN, (instance,) * 40, (batch,))
    return facts


@pytest.mark.parametrize(
    ("ahead", "share", "remark"),
    [
        (
            (None, None, None),
            "0%",
            "no step was announced, and 100% of the bubbles went unused: give all batches to run.rollouts, or call "
            "run.hint",
        ),
        # The first step has no step before it in which it could be announced.
        (
            (60, 30, None),
            "25%",
            "of the tokens; 1 of 2 steps were announced, and 100% of the bubbles went unused",
        ),
        ((None, 60, 60), "100%", "of the tokens; 2 of 2 steps were announced"),
    ],
)
def test_the_page_says_how_much_was_generated_ahead_and_who_announced_nothing(
    ahead: tuple[int | None, ...], share: str, remark: str
) -> None:
    facts = read_facts(run_entries(len(ahead)))
    for step, tokens in zip(facts.steps, ahead, strict=True):
        assert step.tokens == 60
        step.pregenerated = tokens
    assert generated_ahead(facts) == (share, remark)


def test_bubbles_that_were_filled_did_not_go_unused() -> None:
    facts = read_facts(run_entries(2))
    facts.steps[1].pregenerated = None
    idle = {
        row.instance_id: sum(step.rows[place].bubble for step in facts.steps)
        for place, row in enumerate(facts.steps[0].rows)
    }
    assert idle["instance-1"] > 0
    facts.filled = [Filled("instance-1", BEGIN, BEGIN + 100)]
    unused = 1 - idle["instance-1"] / sum(idle.values())
    said = f"no step was announced, and {unused:.0%} of the bubbles went unused"
    assert generated_ahead(facts)[1].startswith(said)
    for step in facts.steps:
        step.rows = ()
    assert generated_ahead(facts)[1].startswith("no step was announced: give")


def test_a_full_index_is_shown_with_the_setting_to_raise() -> None:
    entries = run_entries(2)
    assert "Index full" not in {tile.name for tile in tiles(read_facts(entries))}
    plans = [entry for entry in entries if entry.kind == "speculation"]
    plans[0].details["lacking_steps"] = 5
    (tile,) = [tile for tile in tiles(read_facts(entries)) if tile.name == "Index full"]
    assert (tile.value, tile.remark[-18:]) == ("25%", "draft_index_tokens")


def generated_ahead(facts: RunFacts) -> tuple[str, str]:
    (tile,) = [tile for tile in tiles(facts) if tile.name == "Generated ahead"]
    return tile.value, tile.remark


@pytest.mark.parametrize("refresh", [0.0, 2.0])
@pytest.mark.parametrize("entries", [[], run_entries(), run_entries(1, 1, 1)])
def test_every_document_is_valid_and_has_each_id_once(entries: list[t.Decision], refresh: float) -> None:
    for facts in (read_facts(entries), with_now(read_facts(entries))):
        text = render(facts, refresh)
        assert text.lstrip().startswith("<!doctype html>")
        document = Reader(text)
        ids = [attributes["id"] for _, attributes, _ in document.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes, _ in document.elements:
            for name in ("aria-labelledby", "aria-describedby", "for"):
                assert set(attributes.get(name, "").split()) <= set(ids)
            if attributes.get("href", "").startswith("#"):
                assert attributes["href"][1:] in ids
        assert {name for name in re.findall(r"url\(#([\w-]+)\)", text)} <= set(ids)


def test_nothing_is_fetched_from_anywhere(page: str, read: Reader) -> None:
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|src=", page)
    assert read.of("script") == read.of("link") == read.of("img") == []
    assert Reader(render(RunFacts("run"), 2.0)).of("script") == [{}]


def test_what_a_run_says_cannot_become_markup() -> None:
    entries = run_entries(run="<script>alert(1)</script>")
    text = render(read_facts(entries))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "a &lt;prompt&gt; &amp; more" in text


def test_each_chart_has_a_name_for_screen_readers_and_a_table_with_all_its_figures(read: Reader) -> None:
    charts = [attributes for attributes in read.of("svg") if attributes.get("class") in ("wide", "narrow")]
    assert len(charts) == 2 * len(read.of("figure")) == 2 * 8
    for attributes in charts:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"]) > 30
    others = [attributes for attributes in read.of("svg") if attributes not in charts]
    assert all(attributes["aria-hidden"] == "true" for attributes in others)
    figures = [parents for tag, _, parents in read.elements if tag == "table" and "figure" in parents]
    assert len(figures) == len(read.of("figure"))
    assert all("details" in parents for parents in figures)


def test_tables_name_their_rows_and_columns_and_scroll_by_keyboard(read: Reader) -> None:
    assert len(read.of("caption")) == len(read.of("table")) > 8
    assert {attributes.get("scope") for attributes in read.of("th")} == {"col", "row"}
    regions = [attributes for attributes in read.of("div") if attributes.get("class") == "scroll"]
    assert len(regions) == len(read.of("table"))
    assert all(
        each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in regions
    )
    labels = [each["aria-label"] for each in regions]
    assert len(labels) == len(set(labels))


def test_on_a_telephone_each_cell_of_a_table_has_the_name_of_its_column(page: str, read: Reader) -> None:
    """A row is then a paragraph: no table is wider than the screen, and none of it is cut."""
    narrow = page[page.index("/* On a telephone") :].partition("\n}\n")[0]
    assert "@media (max-width: 700px)" in narrow
    assert "attr(data-name)" in narrow
    assert "display: block" in narrow
    assert "nowrap" not in narrow
    names = {html.unescape(text) for text in re.findall(r'role="columnheader">([^<]+)<', page)}
    cells = [each for each in (*read.of("td"), *read.of("th")) if each["role"] in ("cell", "rowheader")]
    named = {each["data-name"] for each in cells if "data-name" in each}
    assert named == names - {"step", "instance"}, "a cell such as 'step 3' says it itself"
    assert {each["role"] for each in read.of("tr")} == {"row"}


def test_the_page_begins_with_the_slowest_step(read: Reader) -> None:
    places = {attributes.get("id"): place for place, (_, attributes, _) in enumerate(read.elements)}
    first_card = next(
        place for place, (_, each, _) in enumerate(read.elements) if "card" in each.get("class", "")
    )
    assert places["slow"] == first_card
    assert "No step was much slower than the others." in read.words["p"]


def test_headings_and_landmarks_are_in_order(read: Reader) -> None:
    levels = [int(tag[1]) for tag, _, _ in read.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert (len(read.of("main")), len(read.of("header")), len(read.of("nav"))) == (1, 1, 1)
    assert read.of("html") == [{"lang": "en"}]


def test_figures_of_the_run_are_in_the_page(page: str, facts: RunFacts) -> None:
    assert "Mean reward 0.500 in step 0, 0.507 in step 2." in page
    parts = facts.steps[1].last[0].parts
    page = re.sub(r' (?:role|data-name)="[^"]*"', "", page)
    cells = "".join(f"<td>{parts[name]:.3f}</td>" for name in PART_CLASSES)
    assert f'<th scope="row">step 1</th>{cells}' in page
    assert "1 samples from instance-2 to instance-0" in page
    assert "suffix, position 1: 80.0% of 30" in page


def test_of_a_large_fleet_some_instances_are_shown_and_the_page_says_which() -> None:
    text = render(read_facts(run_entries(steps=1, instances=1000, samples=3000)))
    assert "Of 1,000 instances the 12 that were busy for longest and the 12 that idled most" in text
    assert ">all 1,000</text>" in text
    assert len(text) < 300_000


def test_of_many_steps_and_decisions_the_latest_are_shown_and_the_page_says_so() -> None:
    text = render(read_facts(run_entries(steps=130, instances=1, samples=1)))
    assert "The latest 60 of 130 steps are shown." in text
    assert f"The latest {MOST_DECISIONS} of 260." in text
    assert ">step 129</text>" in text
    assert ">step 69</text>" not in text


def test_of_a_run_that_goes_on_the_page_says_what_is_in_work() -> None:
    text = render(with_now(read_facts(run_entries())), 2.0)
    assert "Step 7 of run: 5 of 8 samples have ended" in text
    assert "32 of 40 instances, those with most samples" in text
    assert 'role="status"' in text
    facts = read_facts(run_entries())
    facts.trouble = "The gateway does not answer."
    assert "The gateway does not answer." in render(facts, 2.0)


def linear_rgb(colour: str) -> tuple[float, float, float]:
    """Return the linear channels of an sRGB colour, each in [0, 1]."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels
    )
    return red, green, blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21, as WCAG 2 defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    red, green, blue = linear_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_marks_contrast_with_what_they_stand_on(theme: str) -> None:
    colours = THEMES[theme]
    for name in ("ink", "muted", "link"):
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5, name
    for name in chart.SERIES:
        assert contrast(colours[name], colours["card"]) >= 3.0, name
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def perceived(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """Return a colour in CIE L*a*b* as somebody sees it with this kind of colour vision."""
    linear = linear_rgb(colour)
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in matrix]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in rows]
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (xyz[0] / 0.95047, xyz[1], xyz[2] / 1.08883)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_parts_can_be_told_apart_without_one_kind_of_cone(theme: str, deficiency: str) -> None:
    for classes in (PART_CLASSES, PHASES):
        ordered = list(classes.values())
        patterns = {each.partition(" ")[2] for each in ordered}
        assert len(patterns) == len(ordered), "no meaning is in the colour alone"
        for one, other in pairwise(ordered):
            pair = (THEMES[theme][each.partition(" ")[0]] for each in (one, other))
            first, second = (perceived(each, DEFICIENCIES[deficiency]) for each in pair)
            distance = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
            assert distance > 15, f"{one} beside {other}"


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [(0.0, 1.0, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.0, 7.0, 4, [0, 2, 4, 6]), (3.0, 3.0, 5, [3.0])],
)
def test_axes_have_round_numbers(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, most) == pytest.approx(expected)


def test_numbers_are_short_and_attributes_are_escaped() -> None:
    assert [short(value) for value in (0, 0.00012, 1.23456, 123.4, 12345)] == [
        "0",
        "1e-04",
        "1.23",
        "123",
        "12,345",
    ]
    assert element("a", cls='x"y', stroke_width=1.50) == '<a class="x&quot;y" stroke-width="1.5"/>'
