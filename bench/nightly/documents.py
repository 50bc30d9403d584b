"""Render the generated tables of documents from figures, and find the other tables. Pure.

A generated part stands between two comments, which are not displayed:

    <!-- figures: rollout overview -->
    ...
    <!-- /figures -->

The first word names the benchmark, the second the view of its figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.report import format_value, markdown_table
from bench.rollout.markdown import Rows, goal_table, modelled_table, overview, regime_table

Published = Mapping[str, Any]
_BLOCK = re.compile(
    r"<!-- figures: (?P<name>\S+) (?P<what>\S+) -->\n(?P<body>.*?)<!-- /figures -->", re.DOTALL
)
_FIGURE = re.compile(r"\d")
_LINK_TARGET = re.compile(r"\]\([^)\n]*\)")


class DocumentError(ValueError):
    """A document names figures that do not exist, or a part of it does not end; the message says which."""


def rewritten(text: str, published: Published) -> str:
    """Return a document with its generated parts rewritten. DocumentError if a part cannot be."""
    if text.count("<!-- figures:") != len(_BLOCK.findall(text)):
        raise DocumentError(
            "a part that begins with <!-- figures: NAME WHAT --> does not end with <!-- /figures -->"
        )

    def fresh(found: re.Match[str]) -> str:
        head = f"<!-- figures: {found['name']} {found['what']} -->"
        lines = _rendered(found["name"], found["what"], published)
        return "\n".join((head, *lines, "<!-- /figures -->"))

    return _BLOCK.sub(fresh, text)


def written_by_hand(text: str) -> list[list[str]]:
    """Return the tables with figures outside generated parts, as lines."""
    # Targets of links may have digits.
    plain = _LINK_TARGET.sub("]", _BLOCK.sub("", text))
    kinds = zip(_tables(_BLOCK.sub("", text)), _tables(plain), strict=True)
    return [table for table, words in kinds if any(map(_FIGURE.search, words))]


def _tables(text: str) -> Iterator[list[str]]:
    table: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
        elif table:
            yield table
            table = []


def _rendered(name: str, what: str, published: Published) -> Sequence[str]:
    own = published.get(name, {}).get("tables", {})
    if name in published and what not in {**_RENDERERS, **own}:
        raise DocumentError(f"{what} of {name}: there are {', '.join({**_RENDERERS, **own})}")
    if name not in published:
        return [
            f"No results are kept yet: `make bench NAME={name}`, then `python -m bench.nightly --publish {name}`."
        ]
    # A table that the benchmark has rendered itself, or one of its figures.
    return (
        markdown_table(own[what]["columns"], own[what]["rows"])
        if what in own
        else _RENDERERS[what](published[name])
    )


def _figures(result: Mapping[str, Any]) -> list[str]:
    goals = result.get("goals", {})
    rows = [
        (f"`{figure}`", format_value(value), format_value(goals[figure]) if figure in goals else "")
        for figure, value in result["figures"].items()
    ]
    return [_origin(result), "", *markdown_table(("figure", "value", "goal"), rows)]


def _origin(result: Mapping[str, Any]) -> str:
    """Return the command of a result, its day and its machine."""
    machine = result.get("machine", {})
    day = result.get("measured_at", "")[:10]
    return f"`{result['command']}`, {day}, {machine.get('cpus')} cores of {machine.get('processor')}"


def _first_subject(result: Mapping[str, Any]) -> Mapping[str, Any]:
    subjects: Mapping[str, Mapping[str, Any]] = result["subjects"]
    return next(iter(subjects.values()))


def _notes(result: Mapping[str, Any], subject: Mapping[str, Any]) -> dict[str, str]:
    """Return the note of each system that has a mark."""
    shown = {name for systems in subject["rows"].values() for name in systems}
    notes = {name: each["note"] for name, each in result["systems"].items() if each["note"] and name in shown}
    absent = subject["absent"].items()
    return notes | {name: f"no figures: {found['reason']}, {found['why']}" for name, found in absent}


def _marks(result: Mapping[str, Any], subject: Mapping[str, Any]) -> dict[str, str]:
    return {name: f" [{place}]" for place, name in enumerate(_notes(result, subject), 1)}


def _listed(result: Mapping[str, Any], subject: Mapping[str, Any]) -> list[str]:
    notes = [f"- [{at}] {name}: {text}" for at, (name, text) in enumerate(_notes(result, subject).items(), 1)]
    return ["", *notes] if notes else []


def _overview(result: Mapping[str, Any]) -> list[str]:
    subject = _first_subject(result)
    goals = goal_table(subject["figures"], subject["goals"])
    table = overview(subject["rows"], _marks(result, subject))
    return [*table, *_listed(result, subject), "", *goals, "", _origin(result)]


def _brief(result: Mapping[str, Any]) -> list[str]:
    subject = _first_subject(result)
    return [*overview(subject["rows"], _marks(result, subject)), "", _origin(result)]


def _modelled(result: Mapping[str, Any]) -> list[str]:
    return [*modelled_table(_first_subject(result)["rows"], {}), "", _origin(result)]


def _of_all_rounds(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a result with only the systems that were measured in every regime in the full number of rounds."""
    subject = _first_subject(result)
    regimes: Rows = subject["rows"]
    found = [
        (name, row["speedup_vs_plain"]["rounds"])
        for systems in regimes.values()
        for name, row in systems.items()
    ]
    most = max(rounds for _, rounds in found)
    whole = {name for name, _ in found if found.count((name, most)) == len(regimes)}
    rows = {
        regime: {name: row for name, row in systems.items() if name in whole}
        for regime, systems in regimes.items()
    }
    return {**result, "subjects": {"": {**subject, "rows": rows, "absent": {}}}}


def _regimes(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, subject in result["subjects"].items():
        marks = _marks(result, subject)
        for regime, systems in subject["rows"].items():
            about = result["regimes"][regime]
            lines += [f"{name}, {regime} ({about}):", "", *regime_table(systems, marks), ""]
        lines += _listed(result, subject)[1:]
    return lines


_RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], Sequence[str]]] = {
    "brief": lambda result: _brief(_of_all_rounds(result)),
    "figures": _figures,
    "modelled": _modelled,
    "overview": _overview,
    "regimes": _regimes,
}
