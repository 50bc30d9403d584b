"""Render the generated tables of documents from figures, and find tables of figures that are not generated. Pure.

A generated part stands between two comments, which are not displayed:

    <!-- figures: rollout overview -->
    ...
    <!-- /figures -->

The first word names the benchmark, the second the view of its figures. The last line of a part is their origin:
command, day and machine, and a mark if the measured code has changed since. The part `evidence answers` has figures
of many benchmarks, each with its own origin (evidence.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.measured_code import changed_share, mark
from bench.nightly.evidence import answer_table
from bench.report import format_value, markdown_table
from bench.rollout.markdown import Rows, goal_table, modelled_table, overview, regime_table

RESULTS = Path("bench/results")
_KEPT = ("goals", "machine", "measured_at", "code", "systems", "regimes", "options", "tables")
"""Keys that are kept in addition to single figures."""
_SUBJECT = ("figures", "goals", "rows", "absent")
"""Keys that are kept of a subject of the rollout benchmark."""


def reduced(result: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return the committed part of a result: single figures, goals, the machine, and rows of the rollout table."""
    figures = {name: value for name, value in result.items() if is_figure(value) and name not in _KEPT}
    kept = {name: result[name] for name in _KEPT if name in result}
    subjects = {
        name: {part: subject[part] for part in _SUBJECT}
        for name, subject in result.get("subjects", {}).items()
    }
    return {"command": command, "figures": figures, **kept, **({"subjects": subjects} if subjects else {})}


def is_figure(value: Any) -> bool:
    """Return True for a number, and for None in the place of one."""
    return value is None or isinstance(value, int | float)


def publish(
    name: str, command: str | None = None, results: Path = RESULTS, runs: Path = Path("runs/bench")
) -> None:
    """Publish the figures of a benchmark's last run to `results`. OSError if it has written none.

    `command` produced the figures; None stands for `make bench` with the rounds of the run.
    """
    result = json.loads((runs / f"{name}.json").read_text())
    results.mkdir(parents=True, exist_ok=True)
    kept = reduced(result, command_of(name, result) if command is None else command)
    (results / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def command_of(name: str, result: Mapping[str, Any]) -> str:
    """Return the `make bench` command that reproduces a result; NAME.SUBJECT is a result of that subject."""
    rounds = result.get("options", {}).get("rounds", 1)
    subjects = result.get("subjects", {})
    benchmark, _, subject = name.rpartition(".")
    what = f"NAME={benchmark} SUBJECT={subject}" if subject in subjects else f"NAME={name}"
    return f"make bench {what}" + (f' BENCH_ARGS="--rounds {rounds}"' if rounds > 1 else "")


def published(results: Path = RESULTS) -> dict[str, Any]:
    """Return all committed figures, by benchmark, with the changed share of their code and its mark."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    changed = {name: changed_share(name, result.get("code")) for name, result in found.items()}
    return {
        name: {**result, "changed": changed[name], "mark": mark(name, changed[name])}
        for name, result in found.items()
    }


Published = Mapping[str, Any]
_BLOCK = re.compile(
    r"<!-- figures: (?P<name>\S+) (?P<what>\S+) -->\n(?P<body>.*?)<!-- /figures -->", re.DOTALL
)
_NUMBERS = re.compile(r"\|[-:| ]*-:[-:| ]*")
"""The line below the head of a table with a column of numbers, which is aligned to the right."""
_ANSWERS = ("evidence", "answers")


class DocumentError(ValueError):
    """A document names figures that do not exist, or a part of it does not end; the message says which."""


def rewritten(text: str, published: Published) -> str:
    """Return a document with its generated parts rewritten. DocumentError if a part cannot be."""
    if text.count("<!-- figures:") != len(_BLOCK.findall(text)):
        raise DocumentError(
            "a part that begins with <!-- figures: NAME WHAT --> does not end with <!-- /figures -->"
        )
    return _BLOCK.sub(lambda part: _fresh(part, published), text)


def outdated(text: str, published: Published) -> list[re.Match[str]]:
    """Return the generated parts that `rewritten` would change; groups are the `name`, `what` and the `body`."""
    return [part for part in _BLOCK.finditer(text) if part[0] != _fresh(part, published)]


def written_by_hand(text: str) -> list[str]:
    """Return the head of each table outside generated parts that has a column of numbers."""
    lines = _BLOCK.sub("", text).splitlines()
    return [head for head, rule in pairwise(lines) if head.startswith("|") and _NUMBERS.fullmatch(rule)]


def _fresh(part: re.Match[str], published: Published) -> str:
    head = f"<!-- figures: {part['name']} {part['what']} -->"
    return "\n".join((head, *_rendered(part["name"], part["what"], published), "<!-- /figures -->"))


def _rendered(name: str, what: str, published: Published) -> Sequence[str]:
    if (name, what) == _ANSWERS:
        return answer_table(published)
    own = published.get(name, {}).get("tables", {})
    if name in published and what not in {**_RENDERERS, **own}:
        raise DocumentError(f"{what} of {name}: there are {', '.join({**_RENDERERS, **own})}")
    if name not in published:
        return [
            f"No results are kept yet: `make bench NAME={name}`, then `python -m bench.nightly --publish {name}`."
        ]
    result = published[name]
    # A table that the benchmark has rendered itself, or one of its figures.
    lines = (
        markdown_table(own[what]["columns"], own[what]["rows"]) if what in own else _RENDERERS[what](result)
    )
    return [*lines, "", _origin(result)]


def _figures(result: Mapping[str, Any]) -> list[str]:
    goals, figures = result.get("goals", {}), result["figures"]
    heads = ("figure", "value", "goal") if goals else ("figure", "value")
    rows = [(f"`{name}`", format_value(figures[name]), format_value(goals.get(name, ""))) for name in figures]
    return markdown_table(heads, [row[: len(heads)] for row in rows])


def _origin(result: Mapping[str, Any]) -> str:
    """Return the command of a result, its day, its machine, and the mark of stale figures."""
    machine = result.get("machine", {})
    day = result.get("measured_at", "")[:10]
    where = f"`{result['command']}`, {day}, {machine.get('cpus')} cores of {machine.get('processor')}"
    return f"{where}; **{result['mark']}**" if result.get("mark") else where


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
    return [*table, *_listed(result, subject), "", *goals]


def _brief(result: Mapping[str, Any]) -> list[str]:
    subject = _first_subject(result)
    return overview(subject["rows"], _marks(result, subject))


def _modelled(result: Mapping[str, Any]) -> list[str]:
    return modelled_table(_first_subject(result)["rows"], {})


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
            lines += ["", f"{name}, {regime} ({about}):", "", *regime_table(systems, marks)]
        lines += _listed(result, subject)
    return lines[1:]


_RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], Sequence[str]]] = {
    "brief": lambda result: _brief(_of_all_rounds(result)),
    "figures": _figures,
    "modelled": _modelled,
    "overview": _overview,
    "regimes": _regimes,
}
