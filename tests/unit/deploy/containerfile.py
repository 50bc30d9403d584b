"""Parser of a container file: its stages and their instructions."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/docker"


@dataclass(slots=True)
class Stage:
    """A stage, from one FROM to the next; `instructions` are pairs of keyword and arguments."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        """Return the arguments of all instructions of a kind."""
        return [rest for each, rest in self.instructions if each == keyword]

    def environment(self) -> dict[str, str]:
        """Return the variables that its ENV instructions set."""
        pairs = [pair for rest in self.all("ENV") for pair in shlex.split(rest)]
        return dict(pair.split("=", 1) for pair in pairs)


def read_stages(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the defaults of the arguments before the first stage, and the stages by name."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for keyword, rest in _instructions(text):
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            assert keyword == "ARG", f"{keyword} before the first stage"
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            stage.instructions.append((keyword, rest))
    return arguments, stages


def let_through(path: str, ignore: str) -> bool:
    """Return True if the rules of a .dockerignore let a file of the context reach the build."""
    kept = True
    for line in ignore.splitlines():
        rule = line.strip()
        if rule and not rule.startswith("#"):
            wanted = rule.startswith("!")
            if _matches(path, rule.removeprefix("!")):
                kept = wanted
    return kept


def exec_form(rest: str) -> list[str]:
    """Return the words of an instruction in JSON form; ValueError for the shell form."""
    words = json.loads(rest)
    assert isinstance(words, list)
    return [str(word) for word in words]


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        keyword, _, rest = line.strip().partition(" ")
        assert keyword.isupper(), f"not an instruction: {line}"
        found.append((keyword, rest.strip()))
    return found


def _matches(path: str, rule: str) -> bool:
    # A rule that names a folder means all that is in it.
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        head = "/".join(parts[:end])
        if rule.startswith("**/"):
            if fnmatchcase(parts[end - 1], rule[3:]):
                return True
        elif head.count("/") == rule.count("/") and fnmatchcase(head, rule):
            return True
    return False
